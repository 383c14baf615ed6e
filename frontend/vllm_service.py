"""vllm.grpc.engine.VllmEngine: the contract through which smg and other gateways drive an engine by token ids.

Owns its methods and the open calls that Abort finds by their request id. Sends nothing, not even initial metadata,
before the engine core has accepted a request. One write is outstanding per stream; what arrives meanwhile goes merged
into the next, so that a reader who stalls holds up nobody and fills no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from greenlane.engine.v1 import engine_pb2
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from frontend.grpc_call import deadline_s, with_status
from frontend.kv_events import KvEvents
from frontend.load_meter import Load, LoadMeter
from frontend.model_files import ModelFiles
from frontend.open_request import OpenRequest
from frontend.openai_fields import invalid
from frontend.peers import Peers, Question
from frontend.request import ApiError, Code
from frontend.serving import NOT_THERE_YET, Health, Served
from frontend.vllm_answer import AnswerMessages
from frontend.vllm_request import prompt_ids, text_request

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
CHUNK_BYTES = 512 << 10
"""Of a tokenizer archive in one message; readers take 4 MiB."""
ABORT = "abort"
"""What frontends tell one another of an Abort call."""
MAX_MESSAGE_BYTES = 4 << 20
"""What readers of this contract take; more would fail at their side as if this server were broken."""
PUSH_S = 1.0
"""Between two load records on one subscription."""
MAX_ABORTS = 1 << 14
MAX_ABORT_BYTES = 128 << 10
"""Of the ids of one Abort call: even written as JSON they are one line between frontends (`peers.MAX_LINE_BYTES`)."""
MAX_FLUSH_WAIT_S = 600.0
FLUSH_LOOK_S = 0.05


class VllmService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # that package has no types
    """The servicer over one served model."""

    def __init__(self, served: Served, files: ModelFiles, peers: Peers, clock: Callable[[], float]) -> None:
        """`clock` is in seconds."""
        self._served = served
        self._files = files
        self._clock = clock
        self._meter = LoadMeter(served, clock)
        self._peers = peers
        peers.on(ABORT, self._abort_for_peer)
        self._calls: dict[str, dict[_Call, None]] = {}
        self._last_request_at = 0.0

    # ------------------------------ requests

    @with_status
    async def Generate(self, request: Any, context: Any) -> None:
        """The answer; however the call ends, the request in the engine core ends with it."""
        self._last_request_at = time.time()
        with self._served.call(), self._listed(request.request_id) as call:
            with self._served.refusals_counted():
                ids = await prompt_ids(self._served, request)
                asked = text_request(request, ids, deadline_s(context))
            answer = AnswerMessages(asked, request.stream)
            if not call.aborted:
                async with self._served.start(asked) as call.opened:
                    await _send(call, answer, context)
            if call.aborted:
                for message in answer.aborted():
                    await context.write(message)

    @contextlib.contextmanager
    def _listed(self, request_id: str) -> Iterator[_Call]:
        """A call as long as Abort may find it; an id that several calls bear ends them all."""
        call = _Call()
        self._calls.setdefault(request_id, {})[call] = None
        try:
            yield call
        finally:
            calls = self._calls[request_id]
            del calls[call]
            if not calls:
                del self._calls[request_id]

    @with_status
    async def Abort(self, request: Any, context: Any) -> Any:
        """Ends the requests named, on whichever frontend they are; their calls end with a completion that says so.

        Unknown ids are ignored. Raises ApiError (INVALID_ARGUMENT) for more ids than frontends can tell one another.
        """
        if (
            len(request.request_ids) > MAX_ABORTS
            or sum(len(id.encode()) for id in request.request_ids) > MAX_ABORT_BYTES
        ):
            raise invalid(f"request_ids holds more than {MAX_ABORTS} ids or {MAX_ABORT_BYTES} bytes", "request_ids")
        ids = list(request.request_ids)
        await self._abort(ids)
        await self._peers.ask(ABORT, ids=ids)
        return pb.AbortResponse()

    async def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for call in list(self._calls.get(request_id, ())):
                await call.abort()

    async def _abort_for_peer(self, question: Question) -> None:
        """An Abort call reached another frontend of this server."""
        await self._abort(question["ids"])

    @with_status
    async def Embed(self, request: Any, context: Any) -> Any:
        raise ApiError(Code.UNIMPLEMENTED, "embeddings are not served here")

    # ------------------------------ what is served

    @with_status
    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Answers once there is an engine core: a gateway may take any answer for a server that is ready."""
        health = self._served.health
        if health is Health.STARTING:
            raise ApiError(Code.UNAVAILABLE, NOT_THERE_YET)
        return pb.HealthCheckResponse(healthy=health is Health.SERVING, message=health.value)

    @with_status
    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        info, tokenizer = self._info(), self._served.tokenizer
        folder = str(self._files.folder)
        return pb.GetModelInfoResponse(
            model_path=folder,
            tokenizer_path=folder,
            served_model_name=self._served.names[0],
            is_generation=True,
            model_type=self._files.model_type,
            architectures=[info.architecture],
            vocab_size=info.vocab_size,
            max_context_length=info.limits.max_model_len,
            max_req_input_len=info.limits.max_model_len - 1,
            eos_token_ids=info.eos_token_ids,
            pad_token_id=tokenizer.pad_id or 0,
            bos_token_id=tokenizer.bos_id or 0,
            default_sampling_params_json=json.dumps(_defaults(info.defaults)),
        )

    @with_status
    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        info, load = self._info(), await self._meter.sample()
        return pb.GetServerInfoResponse(
            active_requests=self._served.metrics.open_requests,
            is_paused=self._served.health is Health.DRAINING,
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=load.stats.uptime_s,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype="auto",
            block_size=info.page_size,
            model_dtype=info.dtype,
            max_num_seqs=load.slots,
        )

    def _info(self) -> engine_pb2.GetInfoResponse:
        """Raises ApiError (UNAVAILABLE) before the engine core was ever reached."""
        info = self._served.engine_info
        if info is None:
            raise ApiError(Code.UNAVAILABLE, NOT_THERE_YET)
        return info

    @with_status
    async def GetTokenizer(self, request: Any, context: Any) -> None:
        """The tokenizer's files as a zip archive in pieces; the last piece has its SHA-256."""
        archive = self._files.archive
        for start in range(0, len(archive), CHUNK_BYTES):
            data = archive[start : start + CHUNK_BYTES]
            last = start + CHUNK_BYTES >= len(archive)
            await context.write(common.GetTokenizerChunk(data=data, sha256=self._files.sha256 if last else ""))

    # ------------------------------ load

    @with_status
    async def GetLoads(self, request: Any, context: Any) -> Any:
        load = await self._meter.sample()
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("greenlane"),
            dp_rank_count=1,
            loads=[] if request.dp_rank else [_scheduler_load(load)],
        )

    @with_status
    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        """What the prefix caches hold and how that changes, and load records, one a second, to those who take them.

        Never ends by itself. A record repeats the number of the batch before it.
        """
        await context.send_initial_metadata(())  # some readers wait for it before they go on
        events = KvEvents(self._served.engine_cores, request.start_sequence_number)
        sample, due = 0, self._clock()
        async with events.reading():
            while True:
                if due <= self._clock():
                    due = self._clock() + PUSH_S
                    if request.load_records_before_first_batch:
                        with contextlib.suppress(ApiError):  # an engine core that is gone has no load; health says so
                            load, sample = await self._meter.sample(), sample + 1
                            await context.write(
                                common.KvEventBatch(
                                    sequence_number=events.sequence,
                                    timestamp=time.time(),
                                    load=_load_record(load, sample),
                                )
                            )
                batch = await events.next(due - self._clock())
                if batch is not None:
                    await context.write(batch)

    @with_status
    async def FlushCache(self, request: Any, context: Any) -> Any:
        """Drops cached pages once the engine core is idle, `timeout_s` later at the latest. Preempts nothing: pages of
        requests that still run stay, and then the answer isn't `success`."""
        busy = await self._wait_idle(min(max(0.0, request.timeout_s), MAX_FLUSH_WAIT_S))
        dropped = await self._served.flush_cache()
        kept = f"; pages of {busy} open sequences stay" if busy else ""
        return common.FlushCacheResponse(success=not busy, message=f"{dropped} pages dropped{kept}")

    async def _wait_idle(self, timeout_s: float) -> int:
        """Sequences that still run or wait, 0 as soon as there is none. Raises ApiError (UNAVAILABLE)."""
        deadline = self._clock() + timeout_s
        while True:
            stats = await self._served.engine_stats()
            if stats is None:
                raise ApiError(Code.UNAVAILABLE, "the engine core doesn't answer")
            busy = stats.gauges.running + stats.gauges.waiting
            if not busy or self._clock() >= deadline:
                return busy
            await asyncio.sleep(FLUSH_LOOK_S)

    # ------------------------------ not here

    @with_status
    async def StartProfile(self, request: Any, context: Any) -> Any:
        raise ApiError(Code.UNIMPLEMENTED, "profiling is not served here; `greenlane trace` draws a step log")

    StopProfile = StartProfile


class _Call:
    """One open Generate call."""

    def __init__(self) -> None:
        self.aborted = False
        self.opened: OpenRequest | None = None
        """Its request, once that was sent."""

    async def abort(self) -> None:
        """End the request; the call's own task then hears of it and says the rest."""
        self.aborted = True
        if self.opened is not None:
            await self.opened.aclose()


async def _send(call: _Call, answer: AnswerMessages, context: Any) -> None:
    """Write what comes until the answer is over or aborted. Raises ApiError when the request fails."""
    opened = call.opened
    assert opened is not None
    try:
        await opened.accepted()
        async for deltas in opened:
            answer.cached_tokens = opened.usage.cached_tokens
            for message in answer.messages(deltas, opened.prompt_logprobs):
                _check_size(message.ByteSize())
                await context.write(message)
    except ApiError:
        if not call.aborted:
            raise


def _check_size(size: int) -> None:
    if size > MAX_MESSAGE_BYTES:
        raise ApiError(
            Code.INVALID_ARGUMENT,
            f"the answer's next message has {size} bytes; its readers take {MAX_MESSAGE_BYTES}: ask for fewer logprobs",
            "logprobs",
        )


def _defaults(defaults: engine_pb2.SamplingDefaults) -> dict[str, float]:
    """The model's own sampling values, where they aren't neutral."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return {name: getattr(defaults, name) for name, value in neutral.items() if getattr(defaults, name) != value}


def _scheduler_load(load: Load) -> Any:
    gauges, info = load.stats.gauges, load.info
    return pb.SchedulerLoad(
        num_running_reqs=gauges.running,
        num_waiting_reqs=gauges.waiting,
        num_total_reqs=gauges.running + gauges.waiting,
        num_used_tokens=load.used_pages * info.page_size,
        max_total_num_tokens=gauges.pages_total * info.page_size,
        token_usage=load.usage,
        gen_throughput=load.tokens_per_s,
        cache_hit_rate=load.hit_rate,
        utilization=gauges.running / max(1, load.slots),
        max_running_requests=load.slots,
        num_waiting_uncached_tokens=load.waiting_tokens,
    )


def _load_record(load: Load, sample: int) -> Any:
    gauges, info = load.stats.gauges, load.info
    return common.EngineLoad(
        running_requests=gauges.running,
        waiting_requests=gauges.waiting,
        waiting_uncached_tokens=load.waiting_tokens,
        token_usage=load.usage,
        active_token_usage=load.usage,
        gen_throughput=load.tokens_per_s,
        max_running_requests=load.slots,
        sample=sample,
        load_only=True,
        cache_hit_rate=load.hit_rate,
        num_used_tokens=load.used_pages * info.page_size,
        max_total_num_tokens=gauges.pages_total * info.page_size,
        prefill_pending_tokens=load.silent_tokens,
    )
