"""A driver table that orders everything as CUDA does, runs work when a script says so, and checks the order.

Owns `FakeTable`, with streams, events and Green Contexts and with faults where a script puts them; and `Clocks`, vector
clocks per lane, event and buffer, so that one schedule exposes a missing fence whatever the timing. Computes nothing.

Like CUDA, an event that was never recorded queries complete, `event_record` refuses a Green Context's stream, and any
call may report an earlier asynchronous error. Vector clocks: Mattern, "Virtual Time and Global States", 1989.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from engine_core.device.base import Int32
from engine_core.device.driver import Status
from engine_core.device.green import AUTO_DECODE_SMS

Answer = TypeVar("Answer", bound=tuple[Any, ...])
HOST = 0
MAX_THREADS = 2 + 2 * len(AUTO_DECODE_SMS)
"""The host and the streams of `auto`: the primary lane's, and both of each partition."""
Ticks = npt.NDArray[np.int64]


class RaceDetected(Exception):
    """Two accesses to one buffer, at least one of them a write, that nothing orders."""


class Clocks:
    """Last accesses of a family of buffers 0 .. count-1, and the check that a new access is ordered behind them."""

    def __init__(self, what: str, count: int) -> None:
        self._what = what
        self._write_thread = np.zeros(count, np.int64)
        self._write_tick = np.zeros(count, np.int64)
        self._read_tick = np.zeros((MAX_THREADS, count), np.int64)

    def read(self, index: Int32, thread: int, clock: Ticks) -> None:
        """A read by `thread` at `clock`: the last write must have happened before. Raises RaceDetected."""
        self._behind_write(index, thread, clock, "read")
        self._read_tick[thread, index] = clock[thread]

    def write(self, index: Int32, thread: int, clock: Ticks) -> None:
        """A write: the last write and every thread's last read must have happened before. Raises RaceDetected."""
        self._behind_write(index, thread, clock, "written")
        late = self._read_tick[:, index] > clock[:, np.newaxis]
        if late.any():
            other, position = (int(found[0]) for found in late.nonzero())
            self._race(int(index[position]), "written", thread, "read", other)
        self._write_thread[index] = thread
        self._write_tick[index] = clock[thread]

    def _behind_write(self, index: Int32, thread: int, clock: Ticks, verb: str) -> None:
        late = self._write_tick[index] > clock[self._write_thread[index]]
        if late.any():
            first = int(index[late][0])
            self._race(first, verb, thread, "write", int(self._write_thread[first]))

    def _race(self, index: int, verb: str, thread: int, what: str, other: int) -> None:
        raise RaceDetected(
            f"{self._what} {index} is {verb} by thread {thread} unordered with a {what} of thread {other}"
        )


@dataclass(slots=True)
class _Op:
    run: Callable[[], None] | None
    """None: a wait."""
    awaits: _Event | None = None


@dataclass(slots=True)
class _Stream:
    thread: int
    green_ctx: Any | None
    flags: int
    priority: int
    clock: Ticks
    queue: deque[_Op] = field(default_factory=deque)
    enqueued: int = 0
    executed: int = 0
    alive: bool = True


@dataclass(slots=True)
class _Event:
    flags: int
    clock: Ticks | None = None
    """None until recorded."""
    stream: _Stream | None = None
    position: int = 0
    alive: bool = True

    def reached(self) -> bool:
        return self.stream is None or self.stream.executed >= self.position


class Script(Protocol):
    """What a simulation decides: faults by call, and how far streams have got when the host looks."""

    def fault(self, call: str) -> tuple[int, bool] | None:
        """A status to answer instead of the call's own, and whether the call takes effect; None: no fault."""

    def progress(self, table: FakeTable) -> None:
        """Called before each query: may run streams on (`FakeTable.run`)."""


class AtOnce:
    """No faults; all work runs as soon as it is enqueued and nothing blocks it."""

    def fault(self, call: str) -> tuple[int, bool] | None:
        return None

    def progress(self, table: FakeTable) -> None:
        table.run_all()


class FakeTable:
    """A DriverTable over simulated streams. `sms` is the size of the simulated GPU, in multiples of 8."""

    def __init__(self, script: Script | None = None, sms: int = 132) -> None:
        self.script: Script = AtOnce() if script is None else script
        self.host: Ticks = np.zeros(MAX_THREADS, np.int64)
        self.streams: list[_Stream] = []
        self.calls: list[str] = []
        self.live_events = 0
        self._sms = sms

    # ------------------------------------------------------------- simulation

    def enqueue(self, stream: _Stream, run: Callable[[], None]) -> Ticks:
        """Put work on a stream; returns its clock, with which it must announce its accesses."""
        clock = self._tick(stream)
        stream.queue.append(_Op(run))
        stream.enqueued += 1
        return clock

    def _tick(self, stream: _Stream) -> Ticks:
        stream.clock = np.maximum(stream.clock, self.host)
        stream.clock[stream.thread] += 1
        return stream.clock

    def run(self, stream: _Stream, count: int) -> int:
        """Execute up to `count` operations of a stream, as far as its waits allow; returns how many."""
        done = 0
        while stream.queue and done < count:
            op = stream.queue[0]
            if op.awaits is not None and not op.awaits.reached():
                break
            stream.queue.popleft()
            stream.executed += 1
            done += 1
            if op.run is not None:
                op.run()
        return done

    def run_all(self) -> None:
        """Execute everything that can be executed."""
        while sum(self.run(stream, 1 << 30) for stream in self.streams):
            pass

    def host_tick(self) -> Ticks:
        """The host does something of its own (reads results, frees memory): its clock, for the access check."""
        self.host[HOST] += 1
        return self.host

    def _answer(self, call: str, effect: Callable[[], Answer], *failed: Any) -> Answer:
        """The call's own answer, or the script's fault with `failed` in place of the values."""
        self.calls.append(call)
        fault = self.script.fault(call)
        if fault is None:
            return effect()
        status, takes_effect = fault
        if takes_effect:
            effect()
        return cast(Answer, (status, *failed))

    # ------------------------------------------------------------------ calls

    def stream_priority_range(self) -> tuple[int, int, int]:
        return self._answer("stream_priority_range", lambda: (Status.SUCCESS, 0, -5), 0, 0)

    def stream_create(self, flags: int, priority: int) -> tuple[int, Any]:
        return self._answer("stream_create", lambda: self._new_stream(None, flags, priority), None)

    def _new_stream(self, green_ctx: Any | None, flags: int, priority: int) -> tuple[int, _Stream]:
        stream = _Stream(len(self.streams) + 1, green_ctx, flags, priority, np.zeros(MAX_THREADS, np.int64))
        self.streams.append(stream)
        return Status.SUCCESS, stream

    def stream_destroy(self, stream: _Stream) -> tuple[int]:
        def effect() -> tuple[int]:
            if not stream.alive or stream.queue:
                return (Status.INVALID_HANDLE,)
            stream.alive = False
            return (Status.SUCCESS,)

        return self._answer("stream_destroy", effect)

    def stream_synchronize(self, stream: _Stream) -> tuple[int]:
        def effect() -> tuple[int]:
            self.run_all()
            if stream.queue:
                return (Status.UNKNOWN,)
            self.host = np.maximum(self.host, stream.clock)
            return (Status.SUCCESS,)

        return self._answer("stream_synchronize", effect)

    def stream_wait_event(self, stream: _Stream, event: _Event) -> tuple[int]:
        def effect() -> tuple[int]:
            if not event.alive:
                return (Status.INVALID_HANDLE,)
            self._tick(stream)
            if event.clock is not None:
                stream.clock = np.maximum(stream.clock, event.clock)
            stream.queue.append(_Op(None, _Event(event.flags, event.clock, event.stream, event.position)))
            stream.enqueued += 1
            return (Status.SUCCESS,)

        return self._answer("stream_wait_event", effect)

    def sm_resource(self) -> tuple[int, Any]:
        return self._answer("sm_resource", lambda: (Status.SUCCESS, self._sms), None)

    def sm_split(self, resource: Any, sms: int) -> tuple[int, Any, Any]:
        def effect() -> tuple[int, Any, Any]:
            got = -(-max(sms, 8) // 8) * 8
            if got > resource:
                return Status.INVALID_VALUE, None, None
            return Status.SUCCESS, got, resource - got

        return self._answer("sm_split", effect, None, None)

    def sm_count(self, resource: Any) -> tuple[int, int]:
        return self._answer("sm_count", lambda: (Status.SUCCESS, resource), 0)

    def resource_descriptor(self, resource: Any) -> tuple[int, Any]:
        return self._answer("resource_descriptor", lambda: (Status.SUCCESS, ("descriptor", resource)), None)

    def green_ctx_create(self, descriptor: Any) -> tuple[int, Any]:
        return self._answer("green_ctx_create", lambda: (Status.SUCCESS, ["green", descriptor, True]), None)

    def green_ctx_destroy(self, green_ctx: Any) -> tuple[int]:
        def effect() -> tuple[int]:
            in_use = any(stream.alive and stream.green_ctx is green_ctx for stream in self.streams)
            if in_use or not green_ctx[2]:
                return (Status.INVALID_VALUE,)
            green_ctx[2] = False
            return (Status.SUCCESS,)

        return self._answer("green_ctx_destroy", effect)

    def green_ctx_stream_create(self, green_ctx: Any, flags: int, priority: int) -> tuple[int, Any]:
        return self._answer("green_ctx_stream_create", lambda: self._new_stream(green_ctx, flags, priority), None)

    def green_ctx_record_event(self, green_ctx: Any, event: _Event) -> tuple[int]:
        def effect() -> tuple[int]:
            streams = [stream for stream in self.streams if stream.green_ctx is green_ctx]
            if not streams:
                return (Status.INVALID_CONTEXT,)
            return self._record(event, streams[-1])

        return self._answer("green_ctx_record_event", effect)

    def event_create(self, flags: int) -> tuple[int, Any]:
        def effect() -> tuple[int, Any]:
            self.live_events += 1
            return Status.SUCCESS, _Event(flags)

        return self._answer("event_create", effect, None)

    def event_record(self, event: _Event, stream: _Stream) -> tuple[int]:
        def effect() -> tuple[int]:
            if stream.green_ctx is not None:
                return (Status.INVALID_HANDLE,)
            return self._record(event, stream)

        return self._answer("event_record", effect)

    def _record(self, event: _Event, stream: _Stream) -> tuple[int]:
        if not event.alive:
            return (Status.INVALID_HANDLE,)
        self._tick(stream)
        event.clock, event.stream, event.position = stream.clock.copy(), stream, stream.enqueued
        return (Status.SUCCESS,)

    def event_query(self, event: _Event) -> tuple[int]:
        def effect() -> tuple[int]:
            if not event.alive:
                return (Status.INVALID_HANDLE,)
            self.script.progress(self)
            if not event.reached():
                return (Status.NOT_READY,)
            self._seen(event)
            return (Status.SUCCESS,)

        return self._answer("event_query", effect)

    def event_synchronize(self, event: _Event) -> tuple[int]:
        def effect() -> tuple[int]:
            if not event.alive:
                return (Status.INVALID_HANDLE,)
            self.run_all()
            if not event.reached():
                return (Status.UNKNOWN,)
            self._seen(event)
            return (Status.SUCCESS,)

        return self._answer("event_synchronize", effect)

    def _seen(self, event: _Event) -> None:
        if event.clock is not None:
            self.host = np.maximum(self.host, event.clock)

    def event_elapsed_ms(self, start: Any, end: Any) -> tuple[int, float]:
        return self._answer("event_elapsed_ms", lambda: (Status.SUCCESS, 0.0), 0.0)

    def event_destroy(self, event: _Event) -> tuple[int]:
        def effect() -> tuple[int]:
            if not event.alive:
                return (Status.INVALID_HANDLE,)
            event.alive = False
            self.live_events -= 1
            return (Status.SUCCESS,)

        return self._answer("event_destroy", effect)
