"""The supervisor's hands: starts processes, hears that they are ready, asks for their health, sends signals.

Owns pipes, pidfds, probes and timers of `greenlane serve`, on one asyncio loop in the main thread (a child's
parent-death signal fires when the *thread* that started it ends). Decides nothing: `supervisor.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from frontend.supervisor import (
    Announce,
    Finish,
    Instruction,
    Kill,
    Say,
    Start,
    Supervisor,
    Terminate,
)

MAX_READY_BYTES = 64 << 10
PROBES_IN_BOUND = 2
"""Probes within the bound of silence; more would find nothing sooner, since silence counts from the last answer."""

Ready = Mapping[str, Any]
"""The JSON object that a process writes once it serves; `grpc` is where it answers health checks."""


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a process: `argv(ready)` with what its previous run announced, None at first."""

    name: str
    argv: Callable[[Ready | None], Sequence[str]]


class Probe(Protocol):
    """Asks one address for its health, again and again."""

    async def answers(self, within: float) -> bool:
        """Whether any answer came, serving or not, within that many seconds."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    pidfd: int
    ready_fd: int | None
    received: bytearray = field(default_factory=bytearray)
    watch: asyncio.Task[None] | None = None


class Hands:
    """Carries out a `Supervisor`'s instructions until it says Finish."""

    def __init__(
        self,
        supervisor: Supervisor,
        commands: Sequence[Command],
        *,
        probe: Callable[[str], Probe],
        silence_bound: float,
        say: Callable[[str], None],
        announce: Callable[[Mapping[str, Ready], Mapping[str, int]], None],
    ) -> None:
        """`announce` gets what each process said when ready, and its pid; `silence_bound` is in seconds."""
        self._supervisor = supervisor
        self._commands = {command.name: command for command in commands}
        self._probe = probe
        self._silence_bound = silence_bound
        self._say = say
        self._announce = announce
        self._running: dict[str, _Running] = {}
        self._ready: dict[str, Ready] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._finish: Finish | None = None
        self._finished = asyncio.Event()
        self._watches: set[asyncio.Task[None]] = set()

    async def run(self) -> Finish:
        """Supervise until nothing runs any more. SIGINT, SIGTERM and SIGHUP are taken over meanwhile."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: self._carry_out(self._supervisor.signalled(loop.time())))
        try:
            self._carry_out(self._supervisor.begin(loop.time()))
            await self._finished.wait()
        finally:
            await self._clean_up()
        assert self._finish is not None
        return self._finish

    # ------------------------------ instructions

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Start(name):
                    self._start(name)
                case Terminate(name):
                    self._signal(name, signal.SIGTERM)
                case Kill(name):
                    self._signal(name, signal.SIGKILL)
                case Say(text):
                    self._say(text)
                case Announce():
                    pids = {name: running.process.pid for name, running in self._running.items()}
                    self._announce(dict(self._ready), pids)
                case Finish():
                    self._finish = instruction
                    self._finished.set()
        self._set_timer()

    def _start(self, name: str) -> None:
        argv = [*self._commands[name].argv(self._ready.get(name))]
        read_fd, write_fd = os.pipe()
        try:
            # A process group of its own: Ctrl-C in the terminal reaches the supervisor alone, which drains in order.
            process = subprocess.Popen(
                [*argv, "--ready-fd", str(write_fd), "--parent-pid", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(write_fd,),
                process_group=0,
            )
        finally:
            os.close(write_fd)
        os.set_blocking(read_fd, False)
        running = _Running(process, os.pidfd_open(process.pid), read_fd)
        self._running[name] = running
        loop = asyncio.get_running_loop()
        loop.add_reader(read_fd, self._hear, name, running)
        loop.add_reader(running.pidfd, self._reap, name, running)

    def _signal(self, name: str, number: signal.Signals) -> None:
        running = self._running.get(name)
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(running.pidfd, number)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        deadline = self._supervisor.next_deadline()
        self._timer = None if deadline in (None, float("inf")) else loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._carry_out(self._supervisor.tick(asyncio.get_running_loop().time()))

    # ------------------------------ events

    def _hear(self, name: str, running: _Running) -> None:
        """Bytes of the ready pipe: one JSON line, then the end."""
        assert running.ready_fd is not None
        data = os.read(running.ready_fd, 65536)
        running.received += data
        if data and b"\n" not in running.received and len(running.received) <= MAX_READY_BYTES:
            return
        self._close_ready(running)
        with contextlib.suppress(ValueError):  # anything else than the line: the process never becomes ready
            message = json.loads(running.received)
            if isinstance(message, dict) and isinstance(message.get("grpc"), str):
                self._ready[name] = message
                running.watch = asyncio.get_running_loop().create_task(self._watch(name, message["grpc"]))
                self._watches.add(running.watch)
                running.watch.add_done_callback(self._watches.discard)
                self._carry_out(self._supervisor.ready(name, asyncio.get_running_loop().time()))

    def _close_ready(self, running: _Running) -> None:
        if running.ready_fd is not None:
            asyncio.get_running_loop().remove_reader(running.ready_fd)
            os.close(running.ready_fd)
            running.ready_fd = None

    def _reap(self, name: str, running: _Running) -> None:
        """The pidfd is readable: the process ended."""
        asyncio.get_running_loop().remove_reader(running.pidfd)
        status = running.process.wait()
        self._release(running)
        del self._running[name]
        self._carry_out(self._supervisor.exited(name, status, asyncio.get_running_loop().time()))

    def _release(self, running: _Running) -> None:
        self._close_ready(running)
        os.close(running.pidfd)
        if running.watch is not None:
            running.watch.cancel()

    async def _watch(self, name: str, address: str) -> None:
        """Report silence, once it has lasted for the bound, until the process ends."""
        loop = asyncio.get_running_loop()
        probe = self._probe(address)
        period = self._silence_bound / PROBES_IN_BOUND
        answered = loop.time()
        try:
            while True:
                if await probe.answers(self._silence_bound - (loop.time() - answered)):
                    answered = loop.time()
                elif loop.time() - answered >= self._silence_bound:
                    self._carry_out(self._supervisor.silent(name, loop.time() - answered))
                    return
                await asyncio.sleep(period - loop.time() % period)  # all watches wake together: fewer wake-ups
        finally:
            await probe.close()

    async def _clean_up(self) -> None:
        """Leave nothing behind, however `run` ended."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        for running in self._running.values():
            loop.remove_reader(running.pidfd)
            running.process.kill()
            running.process.wait()
            self._release(running)
        self._running.clear()
        for watch in list(self._watches):
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


class HealthProbe:
    """grpc.health.v1 Check over one local channel."""

    def __init__(self, address: str) -> None:
        import grpc.aio
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = health_pb2_grpc.HealthStub(self._channel)
        self._request = health_pb2.HealthCheckRequest()

    async def answers(self, within: float) -> bool:
        """Whether any answer came; one with an error that the server itself chose counts."""
        import grpc

        try:
            await self._stub.Check(self._request, timeout=max(within, 0.01))
        except grpc.aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        return True

    async def close(self) -> None:
        await self._channel.close(None)


def run_supervisor(hands: Callable[[], Hands]) -> Finish:
    """Run to the end on a fresh event loop in this thread."""
    return asyncio.run(_run(hands))


async def _run(hands: Callable[[], Hands]) -> Finish:
    return await hands().run()
