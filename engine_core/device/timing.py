"""When a lane's work ran: spans between two marks, in µs on one time base, for the step log.

Owns the timing events. They are apart from completions, which carry no time (rule E1), prove nothing, and exist only
while a step log is on. Their errors are a device's errors like any other (rule O14).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine_core.device.driver import TIMING_EVENT_FLAGS, Driver, DriverError
from engine_core.device.lanes import LaneStream, record
from engine_core.step import Lane

log = logging.getLogger("greenlane.worker")

REBASE_MS = 8000.0
"""The driver tells elapsed time as a float32 of milliseconds: beyond 2^13 ms its steps would exceed 1 µs."""


@dataclass(slots=True)
class Base:
    """A moment of the time base: an event that is complete, and the µs at which it was."""

    event: Any
    at_us: float
    spans: int = 0
    """Spans that are told relative to it and not yet read."""


@dataclass(slots=True)
class Span:
    """Work of one lane between two marks; `end` is None until the second is set."""

    lane: Lane
    start: Any
    end: Any = None
    base: Base | None = None


class Timer(Protocol):
    """Marks on lanes, read once the work between them is proven complete."""

    clock: str
    """gpu: the marks are stamped by the GPU; host: by this process."""

    def begin(self, lane: Lane) -> Span:
        """Mark the lane before work is enqueued on it. Raises DriverError."""

    def finish(self, span: Span) -> None:
        """Mark the lane behind the work. Raises DriverError."""

    def read(self, span: Span) -> tuple[float, float]:
        """(start, end) in µs of a finished span whose work is proven complete; ends the span. Raises DriverError."""

    def drop(self, span: Span) -> None:
        """End a span whose work failed; its lane is proven idle."""

    def close(self) -> None:
        """Free everything; every lane is proven idle."""


class HostTimer:
    """For devices without timing events: from the call that enqueues to the moment at which completion was seen."""

    clock = "host"

    def __init__(self, now_us: Callable[[], float]) -> None:
        self._now_us = now_us

    def begin(self, lane: Lane) -> Span:
        return Span(lane, self._now_us())

    def finish(self, span: Span) -> None:
        span.end = self._now_us()

    def read(self, span: Span) -> tuple[float, float]:
        return span.start, self._now_us()

    def drop(self, span: Span) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to free."""


class GpuTimer:
    """Timing events on the lanes' own streams, each used again once it was read.

    All times count from one event, recorded and waited for at the start, so that lanes compare exactly. They start at
    the host's µs of that moment; afterwards the two clocks drift apart by some millionths. A start mark is stamped when
    the lane reaches it: on a lane that had run dry, the time of enqueueing counts into the span.
    """

    clock = "gpu"

    def __init__(self, driver: Driver, streams: dict[Lane, LaneStream], now_us: Callable[[], float]) -> None:
        self._driver = driver
        self._streams = streams
        self._events: list[Any] = []
        self._free: list[Any] = []
        event = self._mark(Lane.PRIMARY)
        driver.event_wait(event)
        self._base = Base(event, now_us())

    def _mark(self, lane: Lane) -> Any:
        if not self._free:
            self._free.append(self._driver.call("event_create", TIMING_EVENT_FLAGS))
            self._events.append(self._free[-1])
        event = self._free.pop()
        record(self._driver, self._streams[lane], event)
        return event

    def begin(self, lane: Lane) -> Span:
        self._base.spans += 1
        return Span(lane, self._mark(lane), base=self._base)

    def finish(self, span: Span) -> None:
        span.end = self._mark(span.lane)

    def read(self, span: Span) -> tuple[float, float]:
        base = self._base_of(span)
        if not self._driver.event_done(span.end):
            self._driver.event_wait(span.end)  # the work is proven complete: the mark behind it is a moment away
        start = base.at_us + 1e3 * float(self._driver.call("event_elapsed_ms", base.event, span.start))
        elapsed_ms = float(self._driver.call("event_elapsed_ms", base.event, span.end))
        end = base.at_us + 1e3 * elapsed_ms
        if base is self._base and elapsed_ms > REBASE_MS:
            self._base = Base(span.end, end)
        else:
            self._free.append(span.end)
        self._release(span, base)
        return start, end

    def drop(self, span: Span) -> None:
        if span.end is not None:
            self._free.append(span.end)
        self._release(span, self._base_of(span))

    def _base_of(self, span: Span) -> Base:
        if span.base is None:
            raise ValueError("the span is of another timer")
        return span.base

    def _release(self, span: Span, base: Base) -> None:
        """The start mark may be used again, and so may a former base that no span is told by any more."""
        self._free.append(span.start)
        base.spans -= 1
        if base is not self._base and base.spans == 0:
            self._free.append(base.event)

    def close(self) -> None:
        """A failed destroy leaks an event and can't race (rule E4)."""
        for event in self._events:
            try:
                self._driver.call("event_destroy", event)
            except DriverError as error:
                log.warning("a timing event leaks", extra={"fields": {"error": str(error)}})
        self._events.clear()
