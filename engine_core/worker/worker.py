"""The worker process: handshake, then plans in and results out, until the core says shutdown or is gone.

Owns the process's life: every way it ends is here or in `fail_stop.py`. Executes nothing itself (`runner.py` does).
`Worker.step` never blocks outside bounded driver calls; the waiting is the loop's.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from engine_core.config import WorkerConfig
from engine_core.device.base import Device
from engine_core.device.completion import CompletionThread
from engine_core.device.driver import Abort, Watch
from engine_core.device.drop_queue import DropQueue
from engine_core.device.fail_stop import FailStop, Watchdog
from engine_core.device.guard import LaunchGuard
from engine_core.device.lanes import Completion, Lanes
from engine_core.errors import ConfigError, ProtocolViolation, describe_chain
from engine_core.executor.channel import (
    CaughtUp,
    Configure,
    Farewell,
    Forget,
    FrameChannel,
    Hello,
    Plan,
    Prepare,
    Prepared,
    Quiesce,
    Quiesced,
    Ready,
    Result,
    Shutdown,
)
from engine_core.executor.frames import EXIT_GRACE_S, PeerLost, ZmqFrames, connect_worker
from engine_core.executor.processes import die_with_parent
from engine_core.log import LEVELS, configure, event
from engine_core.model_config import load_model_config
from engine_core.step import StepPlan
from engine_core.worker.constraints import open_grammars
from engine_core.worker.inputs import RowTables
from engine_core.worker.loading import LoadingReports
from engine_core.worker.runner import Runner
from engine_core.worker.step_log import NO_STEP_LOG, StepLog, open_step_log
from engine_core.worker.unconstrained import UNCONSTRAINED, Constraints

log = logging.getLogger("greenlane.worker")

EXIT_FAILED, EXIT_REFUSED, EXIT_CORE_LOST = 1, 2, 1
TIMER_S = 0.001
"""What the loop's timer may be late; a held plan that is due within it is launched."""
FAREWELL_S = 0.05
"""Time for the I/O thread to hand a last frame to the kernel; the control pipe has said the same already."""

OpenDevice = Callable[[WorkerConfig, Watch, Callable[[str, int, int], None]], Device]


def device_opener(device: str) -> OpenDevice:
    """The module that opens this kind of device, imported only now."""
    kind = device.split(":", 1)[0]
    if kind == "cpu":
        from engine_core.device import cpu

        return cpu.open_device
    if kind == "fake":
        from engine_core.device import fake

        return fake.open_device
    if kind == "cuda":
        from engine_core.device.cuda import require_gpu

        require_gpu(device)
        try:
            from engine_core.device.cuda import opening
        except ImportError as error:
            raise ConfigError(
                f"--device {device} needs the cuda extra ({error}): pip install 'greenlane[cuda]'"
            ) from error
        return opening.open_device
    raise ConfigError(f"--device {device} is unknown; use cpu, cuda, cuda:N or fake")


def build_runner(
    device: Device,
    config: WorkerConfig,
    abort: Abort,
    now: Callable[[], float],
    step_log: StepLog = NO_STEP_LOG,
    constraints: Constraints = UNCONSTRAINED,
) -> Runner:
    """A runner over an opened device."""
    lanes = Lanes(device.driver, device.streams, abort)
    drops = DropQueue()
    tables = RowTables(
        max_num_seqs=config.max_num_seqs,
        max_model_len=device.max_model_len,
        page_size=config.page_size,
        total_pages=device.total_pages,
        vocab_size=device.vocab_size,
    )
    return Runner(
        compute=device.compute,
        lanes=lanes,
        guard=LaunchGuard(lanes, drops, abort, device.compute.is_fatal),
        drops=drops,
        tables=tables,
        async_depth=config.async_depth,
        partitions=device.partitions,
        now=now,
        step_log=step_log,
        constraints=constraints,
    )


class Worker:
    """One rank, once its device is open. Errors that nothing can recover end in `abort`."""

    def __init__(
        self,
        channel: FrameChannel,
        runner: Runner,
        watch: Watch,
        abort: Abort,
        *,
        wait_timeout: float,
        constraints: Constraints = UNCONSTRAINED,
    ) -> None:
        self._channel = channel
        self._runner = runner
        self._watch = watch
        self._abort = abort
        self._wait_timeout = wait_timeout
        self._constraints = constraints
        self._pending: list[tuple[Completion, float]] = []
        """What must come within the bound, and since when it is waited for."""
        self._held: StepPlan | None = None
        """Arrived, and launched a little later (`Runner.launch_in`)."""
        self.running = True

    def awaited(self, now: float) -> tuple[Completion | None, float | None]:
        """The completion that the next result needs, and the seconds until something is due: launched work (rule E6),
        a late row, or the launch of a plan that is held.

        Past them: abort. A prefill that hangs is found while decode goes on, and while nobody asks for its result.
        """
        known = self._pending
        self._pending = [
            (completion, next((since for other, since in known if other is completion), now))
            for completion in self._runner.pending()
        ]
        for completion, since in self._pending:
            if now >= since + self._wait_timeout:
                what = f"step {completion.sequence} was not complete on lane {completion.lane.name}"
                self._abort(f"{what} within {self._wait_timeout:g} s (--gpu-wait-timeout)", None)
        due = [since + self._wait_timeout for _, since in self._pending]
        if (late := self._runner.late_until()) is not None:
            due.append(late)
        if self._held is not None:
            due.append(now + self._runner.launch_in() - TIMER_S)
        return self._runner.awaited(), max(0.0, min(due) - now) if due else None

    def lose_core(self) -> None:
        """Nobody will ask for results any more: prove every lane idle, or abort, then free (rules O7, O13)."""
        self.running = False
        self._runner.close()

    def step(self) -> None:
        """Take the frames that have arrived, one plan at a time, and answer what is complete."""
        try:
            self._reply()
            self._launch_if_due()
            while self.running and (body := self._channel.receive()) is not None:
                self._handle(body)
                self._reply()
        except ProtocolViolation as error:
            self._abort("the core broke the protocol", error)
            raise
        except Exception as error:
            self._abort("the worker failed outside guarded work", error)
            raise

    def _launch_if_due(self) -> None:
        if self._runner.launch_in() <= TIMER_S:
            self._launch_held()

    def _launch_held(self) -> None:
        if (plan := self._held) is not None:
            self._held = None
            with self._watch.bounded(f"step {plan.step}"):
                self._runner.launch(plan)

    def _handle(self, body: object) -> None:
        """Whatever arrives behind a held plan is handled behind it."""
        self._launch_held()
        if isinstance(body, Plan):
            self._held = body.plan
            self._launch_if_due()
        elif isinstance(body, Quiesce):
            self._runner.quiesce()
            self._channel.send(Quiesced(body.token))
        elif isinstance(body, Shutdown):
            self._runner.close()
            self.running = False
        elif isinstance(body, Prepare):
            self._constraints.prepare(body.key, body.kind, body.text)
        elif isinstance(body, Forget):
            self._constraints.forget(body.key)
        else:
            raise ProtocolViolation(f"a worker that is ready got {type(body).__name__}")

    def _reply(self) -> None:
        if self.running:
            with self._watch.bounded("collecting results"):
                for result in self._runner.collect():
                    self._channel.send(Result(result))
                if slots := self._runner.caught_up():
                    self._channel.send(CaughtUp(slots))
        if self.running:
            for outcome in self._constraints.outcomes():
                self._channel.send(Prepared(outcome))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="greenlane worker", description="One rank of an engine core, started by the core or by hand beside it."
    )
    parser.add_argument("--connect", required=True, metavar="ipc:///PATH", help="the core's worker socket")
    parser.add_argument(
        "--rank", type=int, default=0, help="which of the workers that share a model; 0 where it has one"
    )
    parser.add_argument("--control-fd", type=int, help="pipe for the last word of an abort; the core passes it")
    parser.add_argument("--parent-pid", type=int, help="process without which the worker must not live")
    parser.add_argument("--log-level", default="info", choices=LEVELS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run a worker to its end; the exit status. An abort ends the process from inside."""
    options = parse(arguments)
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    configure(options.log_level)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if options.parent_pid is not None else signal.SIG_DFL)
    try:
        frames = connect_worker(options.connect)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_REFUSED
    if options.parent_pid is None:
        command = f"greenlane engine --model FOLDER --worker-address unix:{options.connect.removeprefix('ipc://')}"
        event(log, logging.INFO, "waiting_for_engine_core", start=command, stop="Ctrl-C or SIGTERM")
    linger_s = EXIT_GRACE_S
    try:
        return _serve(frames, FrameChannel(frames), options.rank, options.control_fd)
    except PeerLost as error:
        event(log, logging.WARNING, "core_lost", cause=str(error))
        linger_s = 0.0  # nobody is there to be told
        return EXIT_CORE_LOST
    finally:
        frames.end(linger_s)


def _serve(frames: ZmqFrames, channel: FrameChannel, rank: int, control_fd: int | None) -> int:
    """Handshake, load, then the loop. A core that is gone raises PeerLost; the process's end then frees everything."""
    channel.send(Hello(rank, os.getpid()))
    config = _configuration(frames, channel)
    fail_stop = FailStop(
        farewell=_farewell(frames, channel), control_fd=control_fd, crash_dir=config.crash_dir, end=os._exit
    )
    watchdog = Watchdog(config.gpu_wait_timeout, fail_stop.abort)
    started = time.monotonic()
    try:
        device = device_opener(config.device)(config, watchdog, LoadingReports(channel.send, time.monotonic))
        step_log = _step_log(config, device, rank)
        wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        opened = _constraints(config, device, wake_fd)
        constraints = UNCONSTRAINED if isinstance(opened, str) else opened
        runner = build_runner(device, config, fail_stop.abort, time.monotonic, step_log, constraints)
    except Exception as error:
        refused = isinstance(error, ConfigError)
        channel.send(Farewell(str(error) if refused else describe_chain(error), config_error=refused))
        return EXIT_REFUSED if refused else EXIT_FAILED
    loaded = time.monotonic() - started
    unserved = opened if isinstance(opened, str) else None
    channel.send(
        Ready(
            *(device.total_pages, device.max_model_len, device.dtype, device.name, loaded),
            *(device.lanes.decode_sms, device.lanes.prefill_sms, device.lanes.sm_alignment, device.lanes.choices),
            times=device.times,
            no_grammars=unserved,
        )
    )
    worker = Worker(
        channel, runner, watchdog, fail_stop.abort, wait_timeout=config.gpu_wait_timeout, constraints=constraints
    )
    try:
        _loop(frames, worker, device, step_log, wake_fd)
    except PeerLost:
        worker.lose_core()
        raise
    except Exception as error:
        fail_stop.abort("the worker's loop failed", error)
        raise
    return 0


def _step_log(config: WorkerConfig, device: Device, rank: int) -> StepLog:
    if config.step_log is None:
        return NO_STEP_LOG
    return open_step_log(
        Path(config.step_log),
        device,
        model=Path(config.model).name,
        overlap=config.decode_overlap,
        rank=rank,
        greenlane=version("greenlane"),
        now=time.monotonic,
        unix_time=time.time(),
    )


def _constraints(config: WorkerConfig, device: Device, wake_fd: int) -> Constraints | str:
    """What rows of this model follow, or why they can't follow any grammar."""
    folder = Path(config.model)
    eos = load_model_config(folder).eos_token_ids
    return open_grammars(folder, device.vocab_size, eos, lambda: os.eventfd_write(wake_fd, 1), time.monotonic)


def _loop(frames: ZmqFrames, worker: Worker, device: Device, step_log: StepLog, wake_fd: int) -> None:
    """Sleep until a frame, the awaited completion or a grammar is there, then step."""
    frames.watch(wake_fd)
    completions = CompletionThread(device.driver.table, lambda: os.eventfd_write(wake_fd, 1))
    while worker.running:
        since = time.monotonic()
        completion, timeout = worker.awaited(since)
        if completion is not None:
            completions.watch(completion)
        frames.wait(timeout)
        step_log.waited(completion, since)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(wake_fd)
        worker.step()
    completions.close()


def _configuration(frames: ZmqFrames, channel: FrameChannel) -> WorkerConfig:
    while (body := channel.receive()) is None:
        frames.wait(None)
    if not isinstance(body, Configure):
        raise ProtocolViolation(f"{type(body).__name__} arrived instead of Configure")
    return body.config


def _farewell(frames: ZmqFrames, channel: FrameChannel) -> Callable[[str], None]:
    """Send the last frame and let it leave; only from the thread that owns the socket (the control pipe serves all)."""
    owner = threading.get_ident()

    def tell(cause: str) -> None:
        if threading.get_ident() == owner:
            channel.send(Farewell(cause))
            frames.close()
            time.sleep(FAREWELL_S)

    return tell
