"""The supervisor's hands: starts processes, hears that they are ready and alive, sends signals.

Owns pipes, pidfds and timers of `greenlane serve`, on one asyncio loop in the main thread (a child's
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
from typing import Any

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
from telemetry.life import LIFE

MAX_READY_BYTES = 64 << 10
LATE_S = 1.0
"""A timer that fires this late tells that the supervisor itself stood still."""

Ready = Mapping[str, Any]
"""The JSON object that a process writes once it serves: its addresses, by kind."""


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a process: `argv(ready)` with what its previous run announced, None at first."""

    name: str
    argv: Callable[[Ready | None], Sequence[str]]


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    pidfd: int
    ready_fd: int | None
    alive_fd: int
    received: bytearray = field(default_factory=bytearray)
    heard: float = 0.0
    """Time of the latest sign of life."""
    silence: asyncio.TimerHandle | None = None


class Hands:
    """Carries out a `Supervisor`'s instructions until it says Finish."""

    def __init__(
        self,
        supervisor: Supervisor,
        commands: Sequence[Command],
        *,
        silence_bound: float,
        say: Callable[[str], None],
        announce: Callable[[Mapping[str, Ready], Mapping[str, int]], None],
    ) -> None:
        """`announce` gets what each process said when ready, and its pid; `silence_bound` is in seconds."""
        self._supervisor = supervisor
        self._commands = {command.name: command for command in commands}
        self._silence_bound = silence_bound
        self._say = say
        self._announce = announce
        self._running: dict[str, _Running] = {}
        self._ready: dict[str, Ready] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._finish: Finish | None = None
        self._finished = asyncio.Event()

    async def run(self) -> Finish:
        """Supervise until nothing runs any more. SIGINT, SIGTERM and SIGHUP are taken over meanwhile."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: self._carry_out(self._supervisor.signalled(loop.time())))
        try:
            self._carry_out(self._supervisor.begin(loop.time()))
            await self._finished.wait()
        finally:
            self._clean_up()
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
        (ready, ready_end), (alive, alive_end) = os.pipe(), os.pipe()
        own = ("--ready-fd", str(ready_end), "--alive-fd", str(alive_end), "--parent-pid", str(os.getpid()))
        try:
            # A process group of its own: Ctrl-C in the terminal reaches the supervisor alone, which drains in order.
            process = subprocess.Popen(
                [*argv, *own], stdin=subprocess.DEVNULL, pass_fds=(ready_end, alive_end), process_group=0
            )
        finally:
            os.close(ready_end)
            os.close(alive_end)
        running = _Running(process, os.pidfd_open(process.pid), ready, alive)
        self._running[name] = running
        loop = asyncio.get_running_loop()
        for fd, heard in ((ready, self._hear), (running.pidfd, self._reap), (alive, self._hear_first_sign)):
            os.set_blocking(fd, False)
            loop.add_reader(fd, heard, name, running)

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
                self._watch(name, running)
                self._carry_out(self._supervisor.ready(name, asyncio.get_running_loop().time()))

    def _hear_first_sign(self, name: str, running: _Running) -> None:
        """The alive pipe has a sign, or its other end is closed: the process is ending."""
        asyncio.get_running_loop().remove_reader(running.alive_fd)
        self._hear_life(running)
        if running.heard:
            self._carry_out(self._supervisor.lives(name, asyncio.get_running_loop().time()))

    def _hear_life(self, running: _Running) -> None:
        """Take in the signs of life that wait in the alive pipe.

        Each says when it was given, so that none needs a wake-up of this process: it looks when the bound has passed.
        """
        with contextlib.suppress(BlockingIOError):
            signs = os.read(running.alive_fd, 65536)
            if len(signs) >= LIFE.size:
                (given,) = LIFE.unpack(signs[-LIFE.size :])
                running.heard = max(running.heard, given)

    def _watch(self, name: str, running: _Running) -> None:
        """From now on, report silence once it has lasted for the bound."""
        self._hear_life(running)  # of a long start they might have filled the pipe, and later ones have no room
        running.heard = asyncio.get_running_loop().time()
        self._expect_life(name, running)

    def _expect_life(self, name: str, running: _Running) -> None:
        due = running.heard + self._silence_bound
        running.silence = asyncio.get_running_loop().call_at(due, self._judge, name, running, due)

    def _judge(self, name: str, running: _Running, due: float) -> None:
        """The bound has passed since what was known to be the latest sign of life."""
        self._hear_life(running)
        now = asyncio.get_running_loop().time()
        if now - due > LATE_S:
            running.heard = now
        silent_s = now - running.heard
        if silent_s < self._silence_bound:
            self._expect_life(name, running)
        else:
            self._carry_out(self._supervisor.silent(name, silent_s))

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
        asyncio.get_running_loop().remove_reader(running.alive_fd)
        os.close(running.alive_fd)
        os.close(running.pidfd)
        if running.silence is not None:
            running.silence.cancel()

    def _clean_up(self) -> None:
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
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


def run_supervisor(hands: Callable[[], Hands]) -> Finish:
    """Run to the end on a fresh event loop in this thread."""
    return asyncio.run(_run(hands))


async def _run(hands: Callable[[], Hands]) -> Finish:
    return await hands().run()
