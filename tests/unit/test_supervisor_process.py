"""The supervisor's hands with real, small processes: readiness, ends, signals, silence, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from frontend.supervisor import MAX_RESTARTS, Finish, Supervisor
from frontend.supervisor_process import Command, Hands, Ready
from telemetry.life import LIFE, show_life

CORE, ONE = "engine core", "frontend 1"
GUARD_S = 60.0

SERVES = """
import json, os, signal, struct, sys, time
fd = int(sys.argv[sys.argv.index("--ready-fd") + 1])
alive = int(sys.argv[sys.argv.index("--alive-fd") + 1])
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
signal.signal(signal.SIGALRM, lambda *_: os.write(alive, struct.pack("<d", time.monotonic())))
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
os.write(fd, json.dumps({"grpc": sys.argv[1], "argv": sys.argv[1:]}).encode() + b"\\n")
os.close(fd)
while True:
    signal.pause()
"""
RUBBISH = """
import os, sys
try:
    os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), ({line}).encode())
except BrokenPipeError:
    pass
os._exit(2)
"""
ENDS_WITH = "import sys; sys.exit({status})"


@dataclass
class Run:
    """One supervised run and what it told."""

    scripts: Mapping[str, str]
    on_announce: Callable[[Run], None] = lambda run: run.stop()
    on_say: Callable[[Run, str], None] = lambda run, text: None
    silence_bound: float = 30.0
    said: list[str] = field(default_factory=list)
    ready: Mapping[str, Ready] = field(default_factory=dict)
    pids: Mapping[str, int] = field(default_factory=dict)
    hands: Hands | None = None

    async def __call__(self) -> Finish:
        self.hands = Hands(
            Supervisor(CORE, (ONE,), {CORE: GUARD_S, ONE: GUARD_S}),
            [Command(name, self._argv(name, script)) for name, script in self.scripts.items()],
            silence_bound=self.silence_bound,
            say=self._say,
            announce=self._announce,
        )
        return await asyncio.wait_for(self.hands.run(), GUARD_S)

    @staticmethod
    def _argv(name: str, script: str) -> Callable[[Ready | None], list[str]]:
        python = [sys.executable, "-S", "-E", "-c", script, name]
        return lambda before: [*python, "first" if before is None else "again"]

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.on_say(self, text)

    def _announce(self, ready: Mapping[str, Ready], pids: Mapping[str, int]) -> None:
        self.ready, self.pids = ready, pids
        self.on_announce(self)

    @staticmethod
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def stop_when_serving_again(run: Run, text: str) -> None:
    if "serving again" in text:
        run.stop()


async def test_starts_announces_drains_and_leaves_nothing() -> None:
    """Red if a process, a descriptor or a signal handler outlives the run."""
    descriptors = len(os.listdir("/proc/self/fd"))
    run = Run({CORE: SERVES, ONE: SERVES})
    assert await run() == Finish(0, "stopped by signal")
    assert run.ready.keys() == {CORE, ONE}
    assert all(gone(pid) for pid in run.pids.values())
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_frontends_start_at_the_first_sign_of_life() -> None:
    """Red if they start only once the core is ready: this one gets ready when its frontend runs."""
    waits = SERVES.replace("os.write(fd", "signal.pause()\nwhile not READY:\n    signal.pause()\nos.write(fd")
    with TemporaryDirectory() as folder:
        mark = Path(folder) / "frontend runs"
        core = waits.replace("READY", f"os.path.exists({str(mark)!r})")
        run = Run({CORE: core, ONE: f"open({str(mark)!r}, 'w')\n{SERVES}"})
        assert await run() == Finish(0, "stopped by signal")
        assert run.ready.keys() == {CORE, ONE}


async def test_a_core_that_ends_before_any_sign_starts_nothing() -> None:
    """Red if the end of the pipe counts as a sign."""
    with TemporaryDirectory() as folder:
        mark = Path(folder) / "frontend runs"
        run = Run({CORE: ENDS_WITH.format(status=2), ONE: f"open({str(mark)!r}, 'w')\n{SERVES}"})
        assert (await run()).status == 2
        assert not mark.exists()


async def test_a_killed_process_is_started_again_with_what_it_announced() -> None:
    """Red if the end of a process goes unnoticed, or if its successor isn't told the earlier addresses."""
    run = Run(
        {CORE: SERVES, ONE: SERVES},
        on_announce=lambda run: os.kill(run.pids[ONE], signal.SIGKILL),
        on_say=stop_when_serving_again,
    )
    assert (await run()).status == 0
    assert "the frontend 1 was killed by SIGKILL; restart 1 of 5 in 0.25 s" in run.said


async def test_a_frozen_process_is_killed_and_replaced() -> None:
    """Red if a stopped process, which still exists and holds its sockets, is taken for a living one."""
    run = Run(
        {CORE: SERVES, ONE: SERVES},
        on_announce=lambda run: os.kill(run.pids[CORE], signal.SIGSTOP),
        on_say=stop_when_serving_again,
        silence_bound=1.0,
    )
    assert (await run()).status == 0
    assert any("showed no sign of life" in text for text in run.said)
    assert gone(run.pids[CORE])


async def test_silence_is_counted_from_the_latest_sign_of_life() -> None:
    """Red if a sign counts from when it is looked for, not from when it was given: the bound would be twice as long."""
    bound = 4.0
    frozen_at: list[float] = []

    def freeze(run: Run) -> None:
        frozen_at.append(time.monotonic())
        os.kill(run.pids[CORE], signal.SIGSTOP)

    def freeze_soon(run: Run) -> None:
        asyncio.get_running_loop().call_later(bound / 2, freeze, run)

    def note(run: Run, text: str) -> None:
        if "showed no sign of life" in text:
            frozen_at.append(time.monotonic())
            run.stop()

    await Run({CORE: SERVES, ONE: SERVES}, freeze_soon, note, silence_bound=bound)()
    since, until = frozen_at
    assert until - since < 1.4 * bound


async def test_processes_give_signs_that_are_understood() -> None:
    """Red if a process writes another sign than the supervisor reads, which would kill it again and again."""
    reading, writing = os.pipe()
    before = time.monotonic()
    show_life(writing, asyncio.get_running_loop())
    (given,) = LIFE.unpack(os.read(reading, 65536))
    assert before <= given <= time.monotonic()
    os.close(reading)
    await asyncio.sleep(1.5)  # the next one finds nobody who listens
    os.close(writing)


async def test_signs_of_life_are_heard() -> None:
    """Red if a living process is killed once the bound of silence has passed."""
    run = Run({CORE: SERVES, ONE: SERVES}, on_announce=lambda run: None, silence_bound=2.0)
    task = asyncio.create_task(run())
    await asyncio.sleep(6.0)
    run.stop()
    assert (await task).status == 0
    assert not any("sign of life" in text for text in run.said)


@pytest.mark.parametrize(("status", "restarts"), [(2, 0), (1, MAX_RESTARTS)])
async def test_a_process_that_keeps_ending(status: int, restarts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if refused settings are retried, or if a crash loop goes on for ever."""
    monkeypatch.setattr("frontend.supervisor.FIRST_DELAY_S", 0.001)
    run = Run({CORE: ENDS_WITH.format(status=status), ONE: SERVES})
    assert (await run()).status == status
    assert sum("restart" in text for text in run.said) == restarts


@pytest.mark.parametrize("line", ["'ready when you are'", "'[]'", "'{\"http\": 1}'", "'9' * 200_000"])
async def test_what_is_not_a_ready_line_makes_nothing_ready(line: str) -> None:
    """Red if rubbish on the ready pipe is taken for readiness or ends the supervisor."""
    run = Run({CORE: RUBBISH.format(line=line), ONE: SERVES})
    assert await run() == Finish(2, "the engine core refused its settings")
    assert run.ready == {}


async def test_children_ignore_the_terminal() -> None:
    """Red if a child shares the supervisor's process group: Ctrl-C would reach it beside the supervisor's SIGTERM."""
    groups: list[int] = []

    def look(run: Run) -> None:
        groups.extend(os.getpgid(pid) for pid in run.pids.values())
        run.stop()

    run = Run({CORE: SERVES, ONE: SERVES}, look)
    await run()
    assert os.getpgid(0) not in groups
    assert json.dumps(run.ready[CORE]["argv"]).startswith('["engine core", "first", "--ready-fd"')
