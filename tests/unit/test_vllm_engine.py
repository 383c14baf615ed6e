"""VllmEngine over a real engine core with the fake device: ends, aborts, disconnects, refusals, slow readers, load.

Where a request must still be open, the worker is stopped (SIGSTOP) first, so that no timing decides.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from greenlane.engine.v1 import engine_pb2
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2 as common

from frontend.load_meter import FRESH_S
from tests.unit.core_process import GUARD_S, Core
from tests.unit.rich_errors import reason, retry_ms
from tests.unit.vllm_front import VllmFront, connected, failed, fronting

pytestmark = pytest.mark.e2e
PROMPT = pb.TokenizedInput(input_ids=range(100, 140))
SHORT: dict[str, Any] = {"tokenized": PROMPT, "max_tokens": 24, "ignore_eos": True}
QUEUE = 20
WINDOW = 64 << 10
SMALLEST = 5 + 12
"""Bytes of a message with one token: its frame and its fields."""
LONG: dict[str, Any] = {"tokenized": PROMPT, "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    with tempfile.TemporaryDirectory(prefix="greenlane-test-") as folder:
        room = ("--max-num-seqs=16", f"--max-queue={QUEUE}", "--kv-cache-memory=256MiB")
        core = Core(Path(folder), *room, "--worker-timeout=300", "--gpu-wait-timeout=300")
        asyncio.run(core.ready())
        yield core
        core.close()


class Fake(VllmFront):
    """A front over the fake device."""

    def __init__(self, core: Core, front: VllmFront) -> None:
        super().__init__(front.served, front.service, front.address, front.channel)
        self._core = core

    def freeze(self) -> None:
        """No step ends from now on."""
        self._core.worker.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._core.worker.send_signal(signal.SIGCONT)

    async def stats(self) -> engine_pb2.GetStatsResponse:
        stats = await self.served.engine_stats()
        assert stats is not None
        return stats

    async def until_open(self, sequences: int) -> None:
        """Wait until that many sequences run or wait in the engine core."""
        async with asyncio.timeout(GUARD_S):
            while True:
                gauges = (await self.stats()).gauges
                if gauges.running + gauges.waiting == sequences:
                    return
                await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def front(core: Core) -> AsyncIterator[Fake]:
    async with connected(f"unix:{core.folder / 'grpc.sock'}") as served, fronting(served) as front:
        fake = Fake(core, front)
        try:
            yield fake
        finally:
            fake.thaw()
        await fake.until_open(0)
        assert served.metrics.open_requests == 0
        assert fake.service._calls == {}


async def ids_of(front: Fake, **fields: Any) -> list[int]:
    _, (complete,) = await front.answer(**fields)
    return [*complete.output_ids]


async def test_every_way_the_same_tokens(front: Fake) -> None:
    """Red if streaming loses or doubles a token, or a text isn't tokenized as the gateway would."""
    tokenizer = front.served.tokenizer
    prompt = tokenizer.encode_inline("It is a truth universally")
    chunks, (complete,) = await front.answer(text="It is a truth universally", max_tokens=40, ignore_eos=True)
    assert (complete.prompt_tokens, complete.finish_reason) == (len(prompt), "length")
    whole = await ids_of(
        front, tokenized=pb.TokenizedInput(input_ids=prompt), stream=False, max_tokens=40, ignore_eos=True
    )
    assert [token for chunk in chunks for token in chunk.token_ids] == [*complete.output_ids] == whole
    assert len(whole) == 40


async def test_stop_string_is_found_here(front: Fake) -> None:
    """Red if the engine core works on after a stop string: the gateway cuts the text, but lets the worker run."""
    ids = await ids_of(front, **SHORT, stream=False)
    stop = front.served.tokenizer.decode(ids[8:11])
    before = (await front.stats()).counters
    _, (complete,) = await front.answer(**{**SHORT, "max_tokens": 1900}, stop=[stop])
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)
    assert [*complete.output_ids] == ids[: len(complete.output_ids)]
    assert len(complete.output_ids) <= 11
    await front.until_open(0)
    after = (await front.stats()).counters
    assert after.finished_abort == before.finished_abort + 1
    assert after.output_tokens - before.output_tokens < 1900


async def test_stop_id(front: Fake) -> None:
    """Red if a stop id isn't told apart from a stop string, or the model's own end."""
    ids = await ids_of(front, **SHORT, stream=False)
    _, (complete,) = await front.answer(**SHORT, stop_token_ids=[ids[5]])
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", ids[5])
    assert [*complete.output_ids] == ids[: ids.index(ids[5]) + 1]


# ------------------------------ aborts and disconnects


@pytest.mark.parametrize("stream", [True, False])
async def test_abort(front: Fake, stream: bool) -> None:
    """Red if an aborted call stays open, ends with an error, or misses a sequence's completion."""
    front.freeze()
    fields = {**LONG, "n": 2, "stream": stream}
    calls = [asyncio.create_task(front.answer(**fields, request_id=name)) for name in ("a", "a", "b")]
    await front.until_open(6)
    await front.abort("a", "unknown")
    for call in calls[:2]:
        chunks, completions = await asyncio.wait_for(call, GUARD_S)
        assert [(each.index, each.finish_reason) for each in completions] == [(0, "abort"), (1, "abort")]
        assert chunks == []
    front.thaw()
    await front.until_open(2)
    assert not calls[2].done()
    await front.abort("b")
    _, completions = await asyncio.wait_for(calls[2], GUARD_S)
    assert {each.finish_reason for each in completions} == {"abort"}


async def test_abort_in_mid_stream(front: Fake) -> None:
    """Red if what was already sent is lost in the completion of an aborted call."""
    call = front.generate(**LONG, request_id="a")
    messages = aiter(call)
    seen = [*(await anext(messages)).chunk.token_ids]
    front.freeze()
    await front.abort("a")
    async for message in messages:
        seen += message.chunk.token_ids
    assert message.complete.finish_reason == "abort"
    assert [*message.complete.output_ids] == seen
    front.thaw()


async def test_abort_before_the_request_is_sent(front: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if an abort that comes while a long prompt is being packed is forgotten."""
    held, going = asyncio.Event(), asyncio.Event()
    to_thread = asyncio.to_thread

    async def slow(*work: Any) -> Any:
        going.set()
        await held.wait()
        return await to_thread(*work)

    monkeypatch.setattr("frontend.engine_client.INLINE_PROMPT_TOKENS", 8)
    monkeypatch.setattr("frontend.engine_client.asyncio.to_thread", slow)
    before = (await front.stats()).counters.output_tokens
    call = asyncio.create_task(front.answer(**LONG, request_id="a"))
    await asyncio.wait_for(going.wait(), GUARD_S)
    await front.abort("a")
    held.set()
    _, (complete,) = await asyncio.wait_for(call, GUARD_S)
    assert (complete.finish_reason, [*complete.output_ids]) == ("abort", [])
    assert (await front.stats()).counters.output_tokens - before < 1900


@pytest.mark.parametrize("moment", ["silent", "streaming"])
async def test_client_gone(front: Fake, moment: str) -> None:
    """Red if a request outlives the connection of its client."""
    call = front.generate(**LONG)
    if moment == "streaming":
        await call.read()
        front.freeze()
    else:
        front.freeze()
        await front.until_open(1)
    call.cancel()
    front.thaw()
    await front.until_open(0)


async def test_deadline(front: Fake) -> None:
    """Red if a request outlives its call's deadline."""
    front.freeze()
    error = await failed(front.generate(**LONG, timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_full_queue(front: Fake) -> None:
    """Red if a full queue is anything but RESOURCE_EXHAUSTED with a reason and a time to come back."""
    call = front.generate(**LONG, n=16)
    await call.read()
    front.freeze()
    others = [front.generate(**LONG) for _ in range(QUEUE)]
    await front.until_open(16 + QUEUE)
    error = await failed(front.generate(**LONG))
    assert (error.code(), reason(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert retry_ms(error) is not None
    for each in (call, *others):
        each.cancel()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokenized": pb.TokenizedInput()}, "EMPTY_PROMPT"),
        ({"tokenized": pb.TokenizedInput(input_ids=[5000])}, "TOKEN_OUT_OF_VOCABULARY"),
        ({"tokenized": PROMPT, "max_tokens": 5000}, "CONTEXT_EXCEEDED"),
        ({"tokenized": PROMPT, "temperature": 900.0}, "PARAMETER_OUT_OF_RANGE"),
        ({"tokenized": PROMPT, "logprobs": -1}, "INVALID_ARGUMENT"),
        ({"tokenized": pb.TokenizedInput(input_ids=[2**32 - 1])}, "INVALID_ARGUMENT"),
    ],
)
async def test_refusals_say_why(front: Fake, fields: dict[str, Any], why: str) -> None:
    """Red if a program can't tell the engine core's refusals apart."""
    error = await failed(front.generate(**fields))
    assert (error.code(), reason(error)) == (grpc.StatusCode.INVALID_ARGUMENT, why)


async def test_storm(front: Fake, caplog: pytest.LogCaptureFixture) -> None:
    """Red if any mix of ends, aborts, deadlines and clients that leave loses a request, keeps one, or fails in the
    server: what was accepted has ended, once, and every call has."""
    chance = random.Random(7)
    before = (await front.stats()).counters
    tasks = [asyncio.create_task(one_of_many(front, number, chance.random(), chance.random())) for number in range(300)]
    ends = Counter(await asyncio.wait_for(asyncio.gather(*tasks), GUARD_S))
    await front.until_open(0)
    after = (await front.stats()).counters
    ended = [
        getattr(after, name) - getattr(before, name)
        for name in ("finished_stop", "finished_length", "finished_abort", "finished_error")
    ]
    assert sum(ended) == after.sequences_accepted - before.sequences_accepted
    assert ended[3] <= ends["DEADLINE_EXCEEDED"]  # the engine core noticed those before their connection did
    assert {"length", "abort", "left"} <= ends.keys(), ends
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def one_of_many(front: Fake, number: int, kind: float, delay: float) -> str:
    """How one call of a storm ended."""
    await asyncio.sleep(delay)
    name = f"storm-{number}"
    fields = {**LONG, "max_tokens": 20 if kind < 0.5 else 1900, "stream": kind < 0.7, "request_id": name}
    call = front.generate(**fields, timeout=0.05 if kind > 0.9 else GUARD_S)
    reading = asyncio.create_task(last_word(call))
    if 0.5 < kind < 0.9:
        await asyncio.sleep(0.1 + delay / 2)
        if kind < 0.7:
            await front.abort(name)
        else:
            call.cancel()
    return await reading


async def last_word(call: Any) -> str:
    try:
        async for message in call:
            reason = message.complete.finish_reason
    except grpc.aio.AioRpcError as error:
        return error.code().name
    except asyncio.CancelledError:
        return "left"
    return str(reason)


# ------------------------------ slow readers, load, cache


async def test_stalled_reader(front: Fake) -> None:
    """Red if a client that doesn't read is written to message after message: what waits must be merged, and nothing
    lost of it."""
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", WINDOW), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(front.address, options=window) as channel:
        stalled = VllmFront(front.served, front.service, front.address, channel)
        call = stalled.generate(**LONG, n=16)
        first = await call.read()
        await front.until_open(0)  # everything was generated, next to nothing read
        messages, tokens, completions = 1, len(first.chunk.token_ids), 0
        while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            messages += 1
            tokens += len(message.chunk.token_ids)
            completions += message.HasField("complete")
    assert (tokens, completions) == (16 * 1900, 16)
    assert messages < 2 * WINDOW / SMALLEST + 100 < tokens / 3  # a window at either side, then one a sequence


async def test_loads_are_real(front: Fake) -> None:
    """Red if the load that a gateway sees isn't what the engine core has to do."""
    running = front.generate(**LONG, n=16)
    await running.read()
    front.freeze()
    waiting = front.generate(**LONG)
    await front.until_open(17)
    await asyncio.sleep(2 * FRESH_S)
    (load,) = (await front.engine.GetLoads(pb.GetLoadsRequest())).loads
    assert (load.num_waiting_reqs, load.num_total_reqs, load.max_running_requests) == (1, 17, 16)
    assert load.num_used_tokens > 0
    assert load.num_waiting_uncached_tokens == 40
    for call in (running, waiting):
        call.cancel()


async def test_flush(front: Fake) -> None:
    """Red if cached pages stay, if a flush preempts, or calls itself a success while pages in use stay."""
    await ids_of(front, **SHORT, stream=False)
    await front.until_open(0)
    assert (await front.stats()).gauges.pages_cached > 0

    async def flush(timeout_s: float) -> Any:
        return await front.engine.FlushCache(common.FlushCacheRequest(timeout_s=timeout_s))

    done = await flush(0.0)
    assert done.success
    assert (await front.stats()).gauges.pages_cached == 0
    front.freeze()
    call = front.generate(**LONG)
    await front.until_open(1)
    busy = await flush(0.1)
    assert not busy.success
    assert "1 open sequences stay" in busy.message
    waiting = asyncio.ensure_future(flush(GUARD_S))
    call.cancel()
    front.thaw()
    assert (await waiting).success
