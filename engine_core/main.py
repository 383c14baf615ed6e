"""The engine-core process: two threads, their start, and every way they end.

Owns the process's life: states, signals, exit status, crash report, the ready line. The main thread runs asyncio and
gRPC, the engine thread everything else (`host.py`).

Exit status: 0 after a drain or a stop; 1 after a fail-stop (a restart may help); 2 for settings that can't be served.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import secrets
import signal
from collections.abc import Coroutine
from importlib.metadata import version
from pathlib import Path

import uvloop
from greenlane.engine.v1 import engine_pb2 as pb

from access.folders import private_folder
from access.policy import AccessError
from engine_core.cli import refuse
from engine_core.config import EngineConfig, WorkerConfig
from engine_core.device.fail_stop import write_crash_report
from engine_core.engine import Engine
from engine_core.errors import ConfigError, describe_chain
from engine_core.executor.channel import Loading, Ready
from engine_core.executor.processes import set_title, worker_command
from engine_core.executor.sockets import claim_private
from engine_core.executor.zmq import ZmqExecutor
from engine_core.health import Health
from engine_core.host import EngineHost, Publish
from engine_core.ledger import Ledger
from engine_core.log import configure, event
from engine_core.model_config import ModelConfig
from engine_core.progress import Progress
from engine_core.request import MAX_LOGPROBS, ModelLimits, Output
from engine_core.scheduling.policy import AutoPolicy, FixedPolicy, PrefillPolicy
from engine_core.scheduling.scheduler import Scheduler
from engine_core.server import bind, build_server, guards, tracing
from engine_core.service import ENGINE_SERVICE, EngineService, State
from engine_core.session import MAX_MESSAGE_BYTES, MAX_UNACKED_BYTES
from engine_core.spans import EngineSpans
from telemetry.life import show_life

log = logging.getLogger(__name__)

EXIT_STOPPED, EXIT_FAILED = 0, 1
SETTLE_S = 1.0
"""How long clients may take to acknowledge their last words before the process ends."""
CLOSE_GRACE_S = 0.3


def run(
    config: EngineConfig, folder: Path, model: ModelConfig, ready_fd: int | None, alive_fd: int | None = None
) -> int:
    """Serve until stopped; the exit status.

    `folder` holds the model; `ready_fd` gets one JSON line once serving, `alive_fd` the time once a second.
    """
    set_title("gl-engine")
    configure(config.log_level)
    try:
        with private_folder() as sockets, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(EngineProcess(config, folder, model, sockets, ready_fd).serve(alive_fd))
    except (AccessError, ConfigError) as error:
        return refuse(str(error))


class EngineProcess:
    """One life of the engine core: starting, serving, draining or dead. `Listener` of the engine thread."""

    def __init__(
        self, config: EngineConfig, folder: Path, model: ModelConfig, sockets: Path, ready_fd: int | None
    ) -> None:
        self._config = config
        self._folder = folder
        self._model = model
        self._sockets = sockets
        self._ready_fd = ready_fd
        self._address = ""
        self._info = base_info(config, model)
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, alive_fd: int | None = None) -> int:
        """Bind, start the engine thread, serve until it ends; the exit status. Raises ConfigError."""
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._host = EngineHost(self._start_engine, self, self._loop)
        health = Health(ENGINE_SERVICE)
        endpoint = self._config.otlp_traces_endpoint
        traces = None if endpoint is None else tracing(endpoint)
        self._service = EngineService(
            self._host,
            health,
            self._info,
            draw_seed=functools.partial(secrets.randbits, 64),
            spans=None if traces is None else EngineSpans(traces),
        )
        credentials, keys = guards(self._config.access)
        server = build_server(self._service, health, keys)
        if self._config.socket_path is not None:
            claim_private(Path(self._config.socket_path))
        self._address = bind(server, self._config.address, credentials)
        await server.start()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._signalled)
        if alive_fd is not None:
            os.set_blocking(alive_fd, False)
            show_life(alive_fd, self._loop)
        self._host.begin()
        error = await self._outcome
        try:
            return await self._end(error)
        finally:
            for task in self._tasks:
                task.cancel()
            self._service.end_sessions("the engine core has ended")
            await server.stop(CLOSE_GRACE_S)
            if traces is not None:
                await asyncio.to_thread(traces.close)
            await self._host.join()

    # -------------------------- Listener

    def deliver(self, outputs: list[Output]) -> None:
        self._service.deliver(outputs)

    async def dying(self, cause: str) -> None:
        await self._service.die(cause)

    def ended(self, error: BaseException | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(error)

    # -------------------------- on the engine thread

    def _start_engine(self, wake_fd: int, publish: Publish) -> tuple[Engine, ZmqExecutor]:
        """Worker and engine. Raises ConfigError, EngineDead or StartInterrupted; the worker is gone then."""
        config = self._config
        own = config.worker_address is None
        executor = ZmqExecutor(
            self._sockets / "worker-0.sock" if own else Path(str(config.worker_address).removeprefix("unix:")),
            command=worker_command(0, config.log_level) if own else None,
            wake_fd=wake_fd,
            gpu_wait_timeout=config.gpu_wait_timeout,
            worker_timeout=config.worker_timeout,
            start_timeout=config.start_timeout,
        )
        try:
            ready = self._start_worker(executor)
            engine = build_engine(config, self._model, ready, executor, publish)
        except BaseException:
            executor.kill()
            raise
        limits = model_limits(config, self._model, ready)
        asyncio.run_coroutine_threadsafe(self._serving(limits, ready), self._loop).result()
        return engine, executor

    def _start_worker(self, executor: ZmqExecutor) -> Ready:
        progress = Progress()

        def show(loading: Loading) -> None:
            progress.show(loading.what, loading.done, loading.total)

        try:
            return executor.start(worker_config(self._config, self._folder), show)
        finally:
            progress.finish()

    # -------------------------- turns of life, on the asyncio loop

    async def _serving(self, limits: ModelLimits, ready: Ready) -> None:
        info = ready_info(self._info, self._config, limits, ready)
        await self._service.serve(limits, info)
        gc.collect()
        gc.freeze()  # what stands by now stays: a collection needn't look through it, and hold up a step, again
        most = self._model.max_position
        if self._config.max_model_len is None and limits.max_model_len < most:
            event(
                log,
                logging.WARNING,
                "context_cut",
                tokens=limits.max_model_len,
                of=most,
                remedy="raise --kv-cache-memory",
            )
        event(log, logging.INFO, "serving", address=self._address, device=ready.device, load_s=round(ready.load_s, 3))
        if self._ready_fd is not None:
            announce(self._ready_fd, self._address, info)

    def _signalled(self) -> None:
        """The first signal drains (while starting there is nothing to drain), the second stops at once."""
        self._signals += 1
        event(log, logging.INFO, "signalled", count=self._signals, state=self._service.state.name.lower())
        if self._signals == 1 and self._service.state in (State.SERVING, State.DRAINING):
            self._spawn(self._drain())
        else:
            self._host.stop(at_once=True)

    async def _drain(self) -> None:
        finished, aborted = await self._service.drain(self._config.drain_timeout)
        event(log, logging.INFO, "drained", finished=finished, aborted=aborted)
        await self._service.settle(SETTLE_S)
        self._host.stop()

    async def _end(self, error: BaseException | None) -> int:
        """Let clients hear their last words, report, choose the exit status. Raises ConfigError."""
        if isinstance(error, ConfigError):
            raise error
        if error is None or (self._signals and self._service.state is State.STARTING):
            await self._service.settle(CLOSE_GRACE_S)
            return EXIT_STOPPED
        await self._service.settle(SETTLE_S)
        cause = describe_chain(error)
        if self._config.crash_dir is not None:
            try:
                report = write_crash_report(Path(self._config.crash_dir), "engine", cause)
                event(log, logging.ERROR, "crash_report", path=str(report))
            except OSError as unwritten:
                event(log, logging.ERROR, "crash_report_not_written", cause=describe_chain(unwritten))
        return EXIT_FAILED

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# ------------------------------ values handed from one part to another


def worker_config(config: EngineConfig, folder: Path) -> WorkerConfig:
    """What the worker is told."""
    return WorkerConfig(
        model=str(folder),
        device=config.device,
        dtype=config.dtype,
        load_format=config.load_format,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget,
        page_size=config.page_size,
        kv_cache_memory=config.kv_cache_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        async_depth=config.async_depth,
        decode_overlap=config.decode_overlap,
        decode_sms=config.decode_sms,
        staged_inputs=config.staged_inputs,
        threads=config.threads,
        gpu_wait_timeout=config.gpu_wait_timeout,
        crash_dir=config.crash_dir,
        step_log=None if config.step_log is None else str(Path(config.step_log).absolute()),
    )


def build_engine(
    config: EngineConfig, model: ModelConfig, ready: Ready, executor: ZmqExecutor, publish: Publish
) -> Engine:
    """The engine over a worker that is ready, with the sizes that it could keep to."""
    scheduler = Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.token_budget,
        page_size=config.page_size,
        total_pages=ready.total_pages,
        max_model_len=ready.max_model_len,
        max_queue=config.max_queue,
        eos_token_ids=model.eos_token_ids,
        async_depth=config.async_depth,
        prefix_caching=config.enable_prefix_caching,
        policy=prefill_policy(config, ready),
    )
    return Engine(scheduler, Ledger(), executor, publish)


def prefill_policy(config: EngineConfig, ready: Ready) -> PrefillPolicy:
    """What `--decode-overlap` says about prompts that arrive beside decode rows."""
    if config.decode_overlap != "auto":
        return FixedPolicy(config.token_budget, lane=config.decode_overlap != "off")
    if ready.times is None:
        raise ConfigError(f"--decode-overlap auto needs a worker that measures its steps; {ready.device} doesn't")
    return AutoPolicy(config.token_budget, ready.times, config.itl_target_ms, config.ttft_target_ms)


def model_limits(config: EngineConfig, model: ModelConfig, ready: Ready) -> ModelLimits:
    """What requests are checked against: the model's, as far as the worker could keep to it."""
    return ModelLimits(
        vocab_size=model.vocab_size,
        max_model_len=ready.max_model_len,
        page_size=config.page_size,
        total_pages=ready.total_pages,
        eos_token_ids=model.eos_token_ids,
        defaults=model.defaults,
        no_grammars=ready.no_grammars,
    )


def base_info(config: EngineConfig, model: ModelConfig) -> pb.GetInfoResponse:
    """What is known before the worker is ready."""
    defaults = model.defaults
    return pb.GetInfoResponse(
        version=version("greenlane"),
        model=config.model,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        defaults=pb.SamplingDefaults(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ),
        eos_token_ids=model.eos_token_ids,
        lanes=pb.LaneInfo(overlap=config.decode_overlap),
        page_size=config.page_size,
        async_depth=config.async_depth,
        prefix_cache=config.enable_prefix_caching,
        instance_id=secrets.token_hex(16),
        limits=pb.Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.token_budget,
            max_queue=config.max_queue,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_unacked_bytes=MAX_UNACKED_BYTES,
            max_logprobs=MAX_LOGPROBS,
        ),
    )


def ready_info(base: pb.GetInfoResponse, config: EngineConfig, limits: ModelLimits, ready: Ready) -> pb.GetInfoResponse:
    """All of it, with the sizes that are in force."""
    info = pb.GetInfoResponse()
    info.CopyFrom(base)
    info.dtype = ready.dtype
    info.device = ready.device
    info.total_pages = ready.total_pages
    info.lanes.decode_sms = ready.decode_sms
    info.lanes.prefill_sms = ready.prefill_sms
    info.lanes.sm_alignment = ready.sm_alignment
    if len(ready.decode_sms_choices) > 1:
        info.lanes.decode_sms_choices.extend(ready.decode_sms_choices)
    info.limits.max_model_len = limits.max_model_len
    return info


def announce(ready_fd: int, address: str, info: pb.GetInfoResponse) -> None:
    """One JSON line for whoever started this process; a reader that is gone is no reason to stop."""
    line = {
        "grpc": address,
        "info": {
            "model": info.model,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "device": info.device,
            "max_model_len": info.limits.max_model_len,
            "total_pages": info.total_pages,
            "page_size": info.page_size,
            "instance_id": info.instance_id,
            "lanes": {
                "overlap": info.lanes.overlap,
                "decode_sms": info.lanes.decode_sms,
                "prefill_sms": info.lanes.prefill_sms,
                "sm_alignment": info.lanes.sm_alignment,
                "decode_sms_choices": list(info.lanes.decode_sms_choices),
            },
        },
    }
    with contextlib.suppress(BrokenPipeError), os.fdopen(ready_fd, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(line) + "\n")
