"""Lanes: ordered queues of GPU work, and completions, the only proof that a lane's work is done.

Owns the streams that lanes run on and the events that prove their progress (rules E1 to E5, OWNERSHIP.md). Decides
nothing about what may be freed: the guard and the drop queue do.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from engine_core.device.driver import EVENT_FLAGS, Abort, Driver, DriverError
from engine_core.step import Lane

log = logging.getLogger("greenlane.worker")


class EventSetupError(Exception):
    """A completion event could not be created or recorded after work was launched (rule E5).

    Recoverable once the lane was synchronized. The message keeps every status, a failed clean-up included (rule E4).
    """


class NotIdle(Exception):
    """Lanes that could not be synchronized, each with its status (rule O9): nothing is known of their work."""


@dataclass(frozen=True, slots=True)
class LaneStream:
    """Where a lane's work goes: a stream and, for a Green Context's stream, the context that must record its events."""

    stream: Any
    green_ctx: Any | None = None


@dataclass(slots=True)
class Completion:
    """An event recorded behind a lane's work up to and including step `sequence`."""

    lane: Lane
    sequence: int
    event: Any
    covers: int
    """The lane's launches behind which the event stands."""
    watched: bool = False
    """A completion thread blocks on the event: it may not be destroyed yet."""


def record(driver: Driver, target: LaneStream, event: Any) -> None:
    """Record an event for the stream launched into, through its own context where it has one (rule E2)."""
    if target.green_ctx is not None:
        driver.call("green_ctx_record_event", target.green_ctx, event)
    else:
        driver.call("event_record", event, target.stream)


class Lanes:
    """The lanes of one device: submit order, completion events, synchronization."""

    def __init__(self, driver: Driver, streams: dict[Lane, LaneStream], abort: Abort) -> None:
        self._driver = driver
        self._streams = streams
        self._abort = abort
        self._launched = dict.fromkeys(Lane, 0)
        self._proven = dict.fromkeys(Lane, 0)
        self._launches = dict.fromkeys(Lane, 0)
        self._proven_launches = dict.fromkeys(Lane, 0)
        """A step launches into a lane more than once; steps alone couldn't say whether all of it is proven."""
        self._parked: list[Completion] = []

    def has(self, lane: Lane) -> bool:
        return lane in self._streams

    def steer(self, lane: Lane, target: LaneStream) -> None:
        """The lane's work goes to that stream from now on. Raises RuntimeError while any on another isn't proven: what
        is recorded later would say nothing of it."""
        if self._streams[lane] is target:
            return
        if self._launches[lane] > self._proven_launches[lane]:
            raise RuntimeError(f"lane {lane.name} can't change its stream: work on it isn't proven complete")
        self._streams[lane] = target

    def proven(self, lane: Lane) -> int:
        """Every step up to this one is proven complete on the lane."""
        return self._proven[lane]

    def launched(self, lane: Lane) -> int:
        """The newest step with work enqueued on the lane."""
        return self._launched[lane]

    def launching(self, lane: Lane, sequence: int | None = None) -> None:
        """Work is about to be enqueued on the lane: from now on it counts as having work.

        `sequence` is the step whose own work it is; None for what goes ahead of the next step's own.
        """
        if sequence is not None:
            self._launched[lane] = sequence
        self._launches[lane] += 1

    def order_after(self, lane: Lane, completion: Completion) -> None:
        """Work enqueued on the lane from now on starts after the completion (rule O1)."""
        self._driver.call("stream_wait_event", self._streams[lane].stream, completion.event)

    def complete(self, lane: Lane, sequence: int) -> Completion:
        """Record a completion behind what was launched into the lane. Raises EventSetupError."""
        try:
            event = self._driver.call("event_create", EVENT_FLAGS)
        except DriverError as error:
            raise EventSetupError(f"the completion event of step {sequence} can't be created: {error}") from error
        try:
            record(self._driver, self._streams[lane], event)
        except DriverError as error:
            text = f"the completion event of step {sequence} can't be recorded: {error}"
            try:
                self._driver.call("event_destroy", event)
            except DriverError as second:
                text += f"; then {second}"
            raise EventSetupError(text) from error
        return Completion(lane, sequence, event, self._launches[lane])

    def done(self, completion: Completion) -> bool:
        """Whether the completion is proven; anything but success or "not ready" aborts (rule E3)."""
        try:
            if not self._driver.event_done(completion.event):
                return False
        except DriverError as error:
            self._abort(f"the completion of step {completion.sequence} can't be proven", error)
            raise
        self._prove(completion.lane, completion.sequence, completion.covers)
        return True

    def discard(self, completion: Completion) -> None:
        """Destroy a proven completion's event, once no thread blocks on it any more.

        A failure is logged: it leaks an event, it can't race (rule E4).
        """
        self._parked.append(completion)
        ready = [parked for parked in self._parked if not parked.watched]
        self._parked = [parked for parked in self._parked if parked.watched]
        for parked in ready:
            try:
                self._driver.call("event_destroy", parked.event)
            except DriverError as error:
                fields = {"step": parked.sequence, "error": str(error)}
                log.warning("a completion event leaks", extra={"fields": fields})

    def synchronize(self) -> None:
        """Block until every lane with launched, unproven work is proven idle. Raises NotIdle when one can't be."""
        failures: list[str] = []
        for lane, target in self._streams.items():
            if self._launches[lane] > self._proven_launches[lane]:
                try:
                    self._driver.stream_wait(target.stream)
                    self._prove(lane, self._launched[lane], self._launches[lane])
                except DriverError as error:
                    failures.append(f"lane {lane.name}: {error}")
        if failures:
            raise NotIdle("; ".join(failures))

    def _prove(self, lane: Lane, sequence: int, launches: int) -> None:
        self._proven[lane] = max(self._proven[lane], sequence)
        self._proven_launches[lane] = max(self._proven_launches[lane], launches)
