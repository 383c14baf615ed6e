"""Decides what to do about the processes of `greenlane serve`: an engine core and its frontends.

Pure: events and the time come in, instructions go out; nothing here starts, kills, waits or reads a clock. The hands
are `supervisor_process.py`'s. Knows processes by name only, never what they serve.

The rules
  * The engine core starts first; frontends start at its first sign of life, since it listens by then, and get ready
    while it loads. When all are ready for the first time, that is announced once.
  * A process that ends is started again, after a delay that doubles with every recent restart. Frontends outlive their
    engine core: they reconnect by themselves.
  * More than MAX_RESTARTS restarts of one process within RESTART_WINDOW_S: everything stops, exit status 1.
  * A process that ends with status 2 says that its settings can't be served: everything stops, exit status 2.
  * A process that doesn't become ready in time, or shows no sign of life, is killed, and so restarted. A frontend's
    time counts from when the engine core is ready.
  * The first signal drains: frontends finish what is open, then the engine core ends. Who falls silent meanwhile is
    killed, too, and who takes longer than the bound; the status is 1 then. The second signal stops at once.
"""

from __future__ import annotations

import enum
import math
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

CONFIG_ERROR = 2
"""Exit status of a process whose settings can't be served."""
MAX_RESTARTS = 5
RESTART_WINDOW_S = 300.0
FIRST_DELAY_S = 0.25
DRAIN_MARGIN_S = 5.0
"""Processes bound their own drain at `drain_timeout`; what is left this much later is killed."""
STOP_S = 2.0
"""From asking a process to stop at once to killing it."""


# ------------------------------ instructions


@dataclass(frozen=True, slots=True)
class Start:
    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM: the first one drains, the second one stops at once."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL."""

    name: str


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the person who watches."""

    text: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Everything serves, for the first time."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing runs any more; `greenlane serve` ends with this status."""

    status: int
    cause: str


Instruction = Start | Terminate | Kill | Say | Announce | Finish


# ------------------------------ state


class Phase(enum.Enum):
    IDLE = "not started yet"
    STARTING = "started, not ready"
    SERVING = "ready"
    WAITING = "ended, will be started again"
    GONE = "ended for good"


class Mode(enum.Enum):
    RUNNING = "keep everything running"
    DRAINING = "finish what is open, then end"
    STOPPING = "end now"


@dataclass(slots=True)
class _Process:
    name: str
    start_bound: float
    """Seconds from start to ready."""
    phase: Phase = Phase.IDLE
    deadline: float = 0.0
    """STARTING: when to give up; WAITING: when to start again."""
    restarts: deque[float] = field(default_factory=deque)
    killed_for: str | None = None
    """Why this supervisor killed it, for the report of its end."""

    @property
    def alive(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.SERVING)


class Supervisor:
    """The state machine. Every method takes the time in seconds (any monotonic clock) and returns instructions."""

    def __init__(
        self, core: str, frontends: Sequence[str], start_bounds: Mapping[str, float], drain_timeout: float = 30.0
    ) -> None:
        self._core = _Process(core, start_bounds[core])
        self._frontends = [_Process(name, start_bounds[name]) for name in frontends]
        self._processes = {process.name: process for process in (self._core, *self._frontends)}
        self._drain_bound = drain_timeout + DRAIN_MARGIN_S
        self._mode = Mode.RUNNING
        self._mode_deadline = 0.0
        self._announced = False
        self._status = 0
        self._cause = "stopped by signal"

    def begin(self, now: float) -> list[Instruction]:
        return [Say(f"starting the {self._core.name}"), self._start(self._core, now)]

    def lives(self, name: str, now: float) -> list[Instruction]:
        """The process gave its first sign of life; it may not be ready for long yet."""
        if self._mode is not Mode.RUNNING or name != self._core.name:
            return []
        return self._start_frontends(now)

    def ready(self, name: str, now: float) -> list[Instruction]:
        """The process says that it serves."""
        process = self._processes[name]
        if self._mode is not Mode.RUNNING or process.phase is not Phase.STARTING:
            return []
        process.phase = Phase.SERVING
        out: list[Instruction] = []
        if process is self._core:
            out += self._start_frontends(now)
            self._bound_frontends(lambda frontend: now + frontend.start_bound)
        if self._announced:
            out.append(Say(f"the {name} is serving again"))
        elif all(each.phase is Phase.SERVING for each in self._processes.values()):
            self._announced = True
            out.append(Announce())
        return out

    def exited(self, name: str, status: int, now: float) -> list[Instruction]:
        """The process ended; `status` is negative for a signal, as subprocess reports it."""
        process = self._processes[name]
        how = process.killed_for or describe_status(status)
        asked, process.killed_for = process.killed_for is not None, None
        if self._mode is Mode.RUNNING:
            return self._stop_or_restart(process, status, how, now)
        # before it is ready a process may not handle SIGTERM yet, and has nothing to lose
        asked = asked or (process.phase is Phase.STARTING and status == -signal.SIGTERM)
        process.phase = Phase.GONE
        if self._mode is Mode.DRAINING and status != 0 and not asked:
            self._fail(1, f"the {name} {how} while draining")
        return self._wind_down()

    def silent(self, name: str, seconds: float) -> list[Instruction]:
        """The process has shown no sign of life for `seconds`. Who is asked to end at once has a bound of its own."""
        process = self._processes[name]
        if self._mode is Mode.STOPPING or process.phase is not Phase.SERVING or process.killed_for:
            return []
        return self._kill(process, f"showed no sign of life for {seconds:.1f} s and was killed")

    def signalled(self, now: float) -> list[Instruction]:
        """SIGINT, SIGTERM or SIGHUP arrived."""
        if self._mode is Mode.RUNNING:
            self._mode, self._mode_deadline = Mode.DRAINING, now + self._drain_bound
            self._give_up_starts()
            out: list[Instruction] = [Say("finishing open requests; once more stops at once")]
            out += [Terminate(each.name) for each in self._frontends if each.alive]
            return out + self._wind_down()
        if self._mode is Mode.DRAINING:
            return [Say("stopping at once"), *self._stop_now(now)]
        return [Kill(each.name) for each in self._processes.values() if each.alive]

    def tick(self, now: float) -> list[Instruction]:
        """Carry out what is due."""
        if self._mode is not Mode.RUNNING:
            return self._end_overdue(now) if now >= self._mode_deadline else []
        out: list[Instruction] = []
        for process in self._processes.values():
            if process.phase is Phase.WAITING and now >= process.deadline:
                out.append(self._start(process, now))
            elif process.phase is Phase.STARTING and now >= process.deadline and not process.killed_for:
                out += self._kill(process, f"was not ready after {process.start_bound:.0f} s and was killed")
        return out

    def _end_overdue(self, now: float) -> list[Instruction]:
        """Of a drain the frontends first: the engine core, which waits for them, ends by itself then."""
        left = [each for each in self._processes.values() if each.alive and not each.killed_for]
        if self._mode is Mode.STOPPING or not left:
            self._mode_deadline = math.inf
            return [Kill(each.name) for each in left]
        self._mode_deadline = now + STOP_S
        overdue = [each for each in left if each is not self._core] or left
        why = f"had not ended {self._drain_bound:g} s after the signal and was killed"
        return [kill for process in overdue for kill in self._kill(process, why)]

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next, or None."""
        if self._mode is not Mode.RUNNING:
            return self._mode_deadline
        waiting = (Phase.WAITING, Phase.STARTING)
        times = [each.deadline for each in self._processes.values() if each.phase in waiting and not each.killed_for]
        return min(times, default=None)

    # ------------------------------ steps of the rules

    def _start(self, process: _Process, now: float) -> Start:
        awaits_core = process is not self._core and self._core.phase is not Phase.SERVING
        process.phase, process.deadline = Phase.STARTING, math.inf if awaits_core else now + process.start_bound
        return Start(process.name)

    def _start_frontends(self, now: float) -> list[Instruction]:
        return [self._start(frontend, now) for frontend in self._frontends if frontend.phase is Phase.IDLE]

    def _bound_frontends(self, deadline: Callable[[_Process], float]) -> None:
        """Those that aren't ready: when to give up."""
        for frontend in self._frontends:
            if frontend.phase is Phase.STARTING:
                frontend.deadline = deadline(frontend)

    def _kill(self, process: _Process, why: str) -> list[Instruction]:
        process.killed_for = why
        if self._mode is Mode.DRAINING:
            self._fail(1, f"the {process.name} {why}")
        return [Kill(process.name)]

    def _stop_or_restart(self, process: _Process, status: int, how: str, now: float) -> list[Instruction]:
        if status == CONFIG_ERROR:
            return self._abandon(process, CONFIG_ERROR, f"the {process.name} refused its settings", now)
        recent = process.restarts
        while recent and recent[0] <= now - RESTART_WINDOW_S:
            recent.popleft()
        if len(recent) >= MAX_RESTARTS:
            minutes = RESTART_WINDOW_S / 60
            cause = f"the {process.name} {how}, after {MAX_RESTARTS} restarts within {minutes:.0f} minutes"
            return self._abandon(process, 1, cause, now)
        if process is self._core:
            self._bound_frontends(lambda _: math.inf)
        delay = FIRST_DELAY_S * 2 ** len(recent)
        recent.append(now)
        process.phase, process.deadline = Phase.WAITING, now + delay
        return [Say(f"the {process.name} {how}; restart {len(recent)} of {MAX_RESTARTS} in {delay:g} s")]

    def _abandon(self, process: _Process, status: int, cause: str, now: float) -> list[Instruction]:
        process.phase = Phase.GONE
        self._fail(status, cause)
        return self._stop_now(now)

    def _stop_now(self, now: float) -> list[Instruction]:
        self._mode, self._mode_deadline = Mode.STOPPING, now + STOP_S
        self._give_up_starts()
        out: list[Instruction] = [Terminate(each.name) for each in self._processes.values() if each.alive]
        return out + self._wind_down()

    def _give_up_starts(self) -> None:
        for process in self._processes.values():
            if not process.alive:
                process.phase = Phase.GONE

    def _wind_down(self) -> list[Instruction]:
        """After a process went: end the engine core once it has no frontend left, and everything once that is gone."""
        if any(each.alive for each in self._frontends):
            return []
        if not self._core.alive:
            return [Finish(self._status, self._cause)]
        return [Terminate(self._core.name)] if self._mode is Mode.DRAINING else []

    def _fail(self, status: int, cause: str) -> None:
        if self._status == 0:
            self._status, self._cause = status, cause


def describe_status(status: int) -> str:
    """How a process ended, in words: `ended with status 1`, `was killed by SIGKILL`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
