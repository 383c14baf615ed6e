"""The guard over launched work: from the first fallible call until something durable owns it (rules O1 to O6, O13).

Owns the states of launched work and what an error in between means: synchronize every lane with launched work, then let
go of what was deferred, then raise; and abort when synchronization can't be proven.
"""

from __future__ import annotations

import enum
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine_core.device.driver import Abort, DriverError
from engine_core.device.drop_queue import DropQueue
from engine_core.device.lanes import Lanes, NotIdle
from engine_core.errors import ProtocolViolation, describe_chain
from engine_core.log import event
from engine_core.step import Lane

log = logging.getLogger("greenlane.worker")


class Ownership(enum.Enum):
    """Where launched work stands. The core's half (core-owned, applied) is tracked by the engine."""

    NONE = "none"
    LAUNCHING = "launching"
    LAUNCHED = "launched"
    WORKER_OWNED = "worker-owned"
    COMPLETE = "complete"
    REPLIED = "replied"
    FAILED = "failed"


_LEGAL = {
    Ownership.NONE: {Ownership.LAUNCHING},
    Ownership.LAUNCHING: {Ownership.LAUNCHED, Ownership.FAILED},
    Ownership.LAUNCHED: {Ownership.WORKER_OWNED, Ownership.FAILED},
    Ownership.WORKER_OWNED: {Ownership.COMPLETE, Ownership.FAILED},
    Ownership.COMPLETE: {Ownership.REPLIED, Ownership.FAILED},
    Ownership.FAILED: {Ownership.REPLIED},
    Ownership.REPLIED: set(),
}


class Owned:
    """A piece of launched work and its ownership state; an illegal transition raises."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.state = Ownership.NONE

    def to(self, state: Ownership) -> None:
        if state not in _LEGAL[self.state]:
            raise AssertionError(f"{self.what} can't go from {self.state.value} to {state.value}")
        self.state = state


class WorkFailed(Exception):
    """Guarded work raised, and every lane is proven idle since: its memory may be reused. Message: the cause chain."""


class LaunchGuard:
    """Arms around launched work. One guard covers every launched, uncollected step of every lane (rule O1)."""

    def __init__(self, lanes: Lanes, drops: DropQueue, abort: Abort, is_fatal: Callable[[BaseException], bool]) -> None:
        self._lanes = lanes
        self._drops = drops
        self._abort = abort
        self._is_fatal = is_fatal

    @contextmanager
    def armed(self, *works: Owned) -> Iterator[None]:
        """Errors inside leave as WorkFailed after proven quiescence, or not at all.

        The error's frames keep the work's tensors alive until the lanes are idle; they are cleared only then (rule O2).
        """
        what = ", ".join(work.what for work in works)
        try:
            yield
        except ProtocolViolation:
            raise
        except Exception as error:
            if isinstance(error, DriverError) or self._is_fatal(error):
                self._abort(f"{what} failed in the driver", error)
                raise
            self.quiesce(what, error)
            _clear_frames(error)
            for work in works:
                work.to(Ownership.FAILED)
            failed = f"{what} failed: {describe_chain(error)}"
            event(log, logging.ERROR, "work_failed", cause=failed)
            raise WorkFailed(failed) from None

    def quiesce(self, what: str, first: BaseException | None = None) -> None:
        """Prove every lane idle, then release what was deferred; abort when that can't be proven (rules O1, O9)."""
        try:
            self._lanes.synchronize()
        except NotIdle as second:
            cause = f"{what}: the lanes can't be synchronized"
            self._abort(cause if first is None else f"{cause} after {describe_chain(first)}", second)
            raise
        for lane in Lane:
            self._drops.release(lane, self._lanes.proven(lane))


def _clear_frames(error: BaseException) -> None:
    """Let go of what the frames of an error and of all its causes hold (rule O2)."""
    pending, seen = [error], set[int]()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [cause for cause in (current.__cause__, current.__context__) if cause is not None]
