"""The production `Executor`: one worker process behind a ZMQ socket.

Owns the handshake, the bounds on every wait (start, step, quiesce, heartbeat, exit) and what a lost worker means: the
whole cause, once, as EngineDead. Decides nothing about requests.

A worker that is frozen stops answering heartbeats and its connection closes, even when idle. One that lives but never
answers a plan runs into the step's bound: its own watchdog aborts it, and the core kills it a second later.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import zmq

from engine_core.config import WorkerConfig
from engine_core.errors import ConfigError, EngineDead, ProtocolViolation
from engine_core.executor.channel import (
    Body,
    CaughtUp,
    Configure,
    Farewell,
    Forget,
    FrameChannel,
    Hello,
    Loading,
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
from engine_core.executor.processes import Command, WorkerProcess, describe_exit
from engine_core.executor.sockets import claim_private
from engine_core.log import event
from engine_core.request import Grammar
from engine_core.step import GrammarPrepared, StepPlan, StepResult

__all__ = ["PeerLost", "StartInterrupted", "ZmqExecutor", "ZmqFrames", "connect_worker"]

log = logging.getLogger(__name__)

KILL_GRACE_S = 1.0
"""How long after a step's bound the worker's own watchdog may take to abort with a cause."""
DEATH_GRACE_S = 0.2
"""How long a closed connection may be ahead of the exit that explains it."""


class StartInterrupted(Exception):
    """Start-up was called off (`wake_fd` became readable) before the worker was ready."""


class ZmqExecutor:
    """The `Executor` over one worker process. Call `start` first; every method belongs to the engine thread.

    `command` builds the worker's command line; None: somebody starts the worker by hand and it isn't killed from here
    (it notices the closed connection itself). `wake_fd` ends `wait`, and calls off `start`, when it becomes readable.
    """

    def __init__(
        self,
        path: Path,
        *,
        command: Command | None,
        wake_fd: int,
        gpu_wait_timeout: float,
        worker_timeout: float,
        start_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        claim_private(path)
        self._path = path
        self._command = command
        self._wake_fd = wake_fd
        self._step_bound = gpu_wait_timeout + KILL_GRACE_S
        self._worker_timeout = worker_timeout
        self._start_timeout = start_timeout
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._frames = ZmqFrames(self._context, heartbeat_timeout_s=worker_timeout)
        try:
            self._frames.bind(path)
        except ConfigError:
            self._frames.end(0.0)
            raise
        self._frames.watch(wake_fd)
        self._channel = FrameChannel(self._frames)
        self._process: WorkerProcess | None = None
        self._ready = False
        self._lost = False
        self._outstanding: deque[int] = deque()
        self._waiting_since = 0.0
        self._prepared: list[GrammarPrepared] = []
        self._caught_up: list[int] = []
        self._quiesce_token = 0
        self._quiesced_token = 0
        self._quiesce_since = 0.0

    # -------------------------- start

    def start(self, config: WorkerConfig, progress: Callable[[Loading], None]) -> Ready:
        """Spawn the worker (or wait for one), configure it and wait until it is ready, with progress on the way.

        Raises ConfigError when the worker refuses its settings or the model, EngineDead when it dies or takes longer
        than the start timeout, StartInterrupted when `wake_fd` calls it off.
        """
        if self._command is not None:
            self._process = WorkerProcess.spawn(self._command, f"ipc://{self._path}")
            self._frames.watch(self._process.pidfd)
            event(log, logging.INFO, "worker_started", pid=self._process.pid)
        else:
            command = f"greenlane worker --connect ipc://{self._path}"
            event(log, logging.INFO, "waiting_for_worker", start=command, stop="Ctrl-C or SIGTERM")
        hello = self._hello()
        event(log, logging.INFO, "worker_connected", rank=hello.rank, pid=hello.pid)
        self._send(Configure(config))
        deadline = self._clock() + self._start_timeout
        while True:
            body = self._next_body(deadline)
            if isinstance(body, Loading):
                progress(body)
            elif isinstance(body, Ready):
                self._ready = True
                return self._checked(body, config)
            else:
                raise self._broken(f"{type(body).__name__} arrived during start-up")

    def _hello(self) -> Hello:
        """The worker's first word. One that is started by hand may take any time to come."""
        body = self._next_body(None if self._process is None else self._clock() + self._start_timeout)
        if not isinstance(body, Hello):
            raise self._broken(f"{type(body).__name__} arrived instead of Hello")
        if body.rank != 0 or (self._process is not None and body.pid != self._process.pid):
            raise self._broken(f"a worker of rank {body.rank} and pid {body.pid} connected")
        return body

    def _next_body(self, deadline: float | None) -> Body:
        """Block for the next frame during start-up."""
        while True:
            body = self._receive()
            if body is not None:
                return body
            if self._lost:
                raise self._dead()
            remaining = None if deadline is None else deadline - self._clock()
            if remaining is not None and remaining <= 0:
                raise self._killed(f"worker 0 wasn't ready within {self._start_timeout:g} s (--start-timeout)")
            self.wait(remaining)
            if self._woken():
                raise StartInterrupted

    def _woken(self) -> bool:
        return bool(zmq.select([self._wake_fd], [], [], 0)[0])

    def _checked(self, ready: Ready, config: WorkerConfig) -> Ready:
        limit = config.max_model_len
        if ready.total_pages < 1 or ready.max_model_len < 2 or (limit is not None and ready.max_model_len > limit):
            raise self._broken(f"Ready names {ready.total_pages} pages and a context of {ready.max_model_len}")
        return ready

    # -------------------------- Executor

    def submit(self, plan: StepPlan) -> None:
        """Send a plan. Raises EngineDead when the worker is lost or doesn't read."""
        if not self._outstanding:
            self._waiting_since = self._clock()
        self._outstanding.append(plan.step)
        self._send(Plan(plan))

    def collect(self) -> list[StepResult]:
        """Results that have arrived, in order. Raises EngineDead for a lost worker, a broken protocol or a late step.

        A result whose step isn't the oldest outstanding one is passed on: which request it fails is for the engine to
        say.
        """
        results: list[StepResult] = []
        while (body := self._receive()) is not None:
            if isinstance(body, Result):
                results.append(self._answered(body.result))
            elif isinstance(body, Quiesced):
                self._quiesced_token = self._checked_token(body.token)
            elif isinstance(body, Prepared):
                self._prepared.append(body.outcome)
            elif isinstance(body, CaughtUp):
                self._caught_up += body.slots
            else:
                raise self._broken(f"{type(body).__name__} arrived while serving")
        if self._lost:
            raise self._dead()
        deadline = self.next_deadline()
        if deadline is not None and self._clock() >= deadline:
            raise self._overdue()
        return results

    def prepare(self, key: int, grammar: Grammar) -> None:
        """Have the worker compile a grammar; it bounds that itself."""
        self._send(Prepare(key, grammar.kind, grammar.text))

    def prepared(self) -> list[GrammarPrepared]:
        prepared, self._prepared = self._prepared, []
        return prepared

    def caught_up(self) -> list[int]:
        slots, self._caught_up = self._caught_up, []
        return slots

    def forget(self, key: int) -> None:
        self._send(Forget(key))

    def quiesce(self) -> None:
        """Ask the worker to synchronize every lane; it answers within the step's bound or is killed."""
        self._quiesce_token += 1
        self._quiesce_since = self._clock()
        self._send(Quiesce(self._quiesce_token))

    @property
    def quiesced(self) -> bool:
        """Whether the latest `quiesce` was answered."""
        return self._quiesced_token == self._quiesce_token

    # -------------------------- waiting

    def next_deadline(self) -> float | None:
        """Clock time at which an unanswered plan or quiesce ends the worker; None while nothing is owed."""
        since = [self._waiting_since] if self._outstanding else []
        if not self.quiesced:
            since.append(self._quiesce_since)
        return min(since) + self._step_bound if since else None

    def wait(self, timeout: float | None) -> None:
        """Block until the worker says or does something, `wake_fd` is readable, a deadline is due or `timeout` is over.

        What happened is `collect`'s to find out.
        """
        deadline = self.next_deadline()
        if deadline is not None:
            remaining = max(0.0, deadline - self._clock())
            timeout = remaining if timeout is None else min(timeout, remaining)
        try:
            self._frames.wait(timeout)
        except PeerLost:
            self._lost = True
        if not self._lost and self._process is not None and self._process.ended:
            self._frames.read_to_the_end(EXIT_GRACE_S)  # its last frame may say why
            self._lost = True

    # -------------------------- end

    def close(self) -> None:
        """Ask the worker to leave, give it a bounded time, kill it otherwise, and release everything."""
        if not self._lost:
            try:
                self._channel.send(Shutdown())
            except ProtocolViolation as error:
                event(log, logging.WARNING, "shutdown_not_sent", cause=str(error))
        if self._process is not None:
            self._process.wait(EXIT_GRACE_S)
            self.kill()
        else:
            self._release(linger_s=EXIT_GRACE_S)

    def kill(self) -> None:
        """End the worker now (SIGKILL), reap it within bounds, and release everything. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            status = process.wait(EXIT_GRACE_S)
            event(log, logging.INFO, "worker_ended", pid=process.pid, how=describe_exit(status))
            process.close()
        self._release(linger_s=0.0)

    def _release(self, linger_s: float) -> None:
        if not self._context.closed:
            self._frames.end(linger_s)
            self._path.unlink(missing_ok=True)

    # -------------------------- frames

    def _send(self, body: Body) -> None:
        try:
            self._channel.send(body)
        except ProtocolViolation as error:
            self.wait(0)
            if self._process is not None and self._process.wait(DEATH_GRACE_S) is not None:
                self.wait(0)  # its threads may end a moment after it
            while self._lost and self._receive() is not None:
                pass
            raise (
                self._dead() if self._lost else EngineDead(f"worker 0 can't be given a {type(body).__name__}")
            ) from error

    def _receive(self) -> Body | None:
        """The next frame that isn't a farewell; a farewell ends the engine, or the start when a setting is to blame."""
        try:
            body = self._channel.receive()
        except ProtocolViolation as error:
            raise EngineDead("worker 0 broke the protocol") from error
        if isinstance(body, Farewell):
            if self._process is not None and not self._ready:
                self._process.wait(EXIT_GRACE_S)  # it ends by itself; nobody waits for answers yet
            if body.config_error and not self._ready:
                raise ConfigError(body.cause)
            raise EngineDead(f"worker 0 aborted: {body.cause}")
        return body

    def _answered(self, result: StepResult) -> StepResult:
        if not self._outstanding:
            raise self._broken(f"a result for step {result.step} arrived although no plan is outstanding")
        self._outstanding.popleft()
        self._waiting_since = self._clock()
        return result

    def _checked_token(self, token: int) -> int:
        if not self._quiesced_token < token <= self._quiesce_token:
            raise self._broken(f"Quiesced names {token}, which wasn't asked for")
        return token

    # -------------------------- causes

    @staticmethod
    def _broken(what: str) -> EngineDead:
        error = EngineDead("worker 0 broke the protocol")
        error.__cause__ = ProtocolViolation(what)
        return error

    def _overdue(self) -> EngineDead:
        owed = f"step {self._outstanding[0]}" if self._outstanding else "quiesce"
        return self._killed(f"worker 0 didn't answer {owed} within {self._step_bound:g} s and was killed")

    def _dead(self) -> EngineDead:
        """Why the worker is gone: its exit, where that explains it, else the silence for which it is killed now."""
        if self._process is None:
            return EngineDead("worker 0 closed its connection or stopped answering heartbeats")
        status = self._process.wait(DEATH_GRACE_S)
        if status is None:
            return self._killed(
                f"worker 0 closed its connection or stopped answering heartbeats for {self._worker_timeout:g} s, "
                "and was killed"
            )
        return self._with_farewell(f"worker 0 (pid {self._process.pid}) {describe_exit(status)}")

    def _killed(self, why: str) -> EngineDead:
        """Kill the worker; what it wrote to the control pipe before is part of the cause."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(EXIT_GRACE_S)
        return self._with_farewell(why)

    def _with_farewell(self, why: str) -> EngineDead:
        farewell = self._process.farewell() if self._process is not None else ""
        return EngineDead(f"{why}: {farewell}" if farewell else why)
