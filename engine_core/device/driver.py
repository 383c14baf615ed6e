"""The table of driver calls, and the one place where their return codes are checked.

Owns the names, statuses and meanings of the calls that order GPU work: streams, Green Contexts, events. `DriverTable`
is the raw table (statuses out, nothing raised); the real one wraps cuda.bindings, tests pass scripted ones, and devices
without streams pass `ImmediateDriver`. `Driver` checks every status and stamps every blocking call with a deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Status(enum.IntEnum):
    """The CUresult values that Greenlane tells apart; any other is an error like UNKNOWN."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_CONTEXT = 201
    INVALID_HANDLE = 400
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_FAILED = 719
    UNKNOWN = 999


class DriverError(Exception):
    """A driver call answered with an error. Nothing is known of the work around it: see OWNERSHIP rules O1 and O14."""

    def __init__(self, call: str, status: int) -> None:
        name = Status(status).name if status in Status._value2member_map_ else "error"
        super().__init__(f"{call} returned {name} ({status})")
        self.call = call
        self.status = status


EVENT_FLAGS = 0x1 | 0x2
"""CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING: rule E1."""
TIMING_EVENT_FLAGS = 0x1
STREAM_NON_BLOCKING = 0x1


class DriverTable(Protocol):
    """Raw calls; the first item of each answer is a CUresult as int, values follow. Handles are opaque."""

    def stream_priority_range(self) -> tuple[int, int, int]: ...
    def stream_create(self, flags: int, priority: int) -> tuple[int, Any]: ...
    def stream_destroy(self, stream: Any) -> tuple[int]: ...
    def stream_synchronize(self, stream: Any) -> tuple[int]: ...
    def stream_wait_event(self, stream: Any, event: Any) -> tuple[int]: ...
    def sm_resource(self) -> tuple[int, Any]: ...
    def sm_split(self, resource: Any, sms: int) -> tuple[int, Any, Any]: ...
    def sm_count(self, resource: Any) -> tuple[int, int]: ...
    def resource_descriptor(self, resource: Any) -> tuple[int, Any]: ...
    def green_ctx_create(self, descriptor: Any) -> tuple[int, Any]: ...
    def green_ctx_destroy(self, green_ctx: Any) -> tuple[int]: ...
    def green_ctx_stream_create(self, green_ctx: Any, flags: int, priority: int) -> tuple[int, Any]: ...
    def green_ctx_record_event(self, green_ctx: Any, event: Any) -> tuple[int]: ...
    def event_create(self, flags: int) -> tuple[int, Any]: ...
    def event_record(self, event: Any, stream: Any) -> tuple[int]: ...
    def event_query(self, event: Any) -> tuple[int]: ...
    def event_synchronize(self, event: Any) -> tuple[int]: ...
    def event_elapsed_ms(self, start: Any, end: Any) -> tuple[int, float]: ...
    def event_destroy(self, event: Any) -> tuple[int]: ...


class Watch(Protocol):
    """Bounds blocking calls: a call still running when its deadline passes ends the process (`fail_stop.Watchdog`)."""

    def bounded(self, what: str) -> AbstractContextManager[None]: ...


class Driver:
    """Checked calls. Raises DriverError; never retries, never ignores."""

    def __init__(self, table: DriverTable, watch: Watch) -> None:
        self.table = table
        self._watch = watch

    def call(self, name: str, *args: Any) -> Any:
        """Make one call of the table and return its value, values as a tuple, or None."""
        status, *values = getattr(self.table, name)(*args)
        if status != Status.SUCCESS:
            raise DriverError(name, status)
        return values[0] if len(values) == 1 else tuple(values) if values else None

    def event_done(self, event: Any) -> bool:
        """Whether the recorded work is complete. NOT_READY is pending; any other non-success raises (rule E3)."""
        (status,) = self.table.event_query(event)
        if status == Status.NOT_READY:
            return False
        if status != Status.SUCCESS:
            raise DriverError("event_query", status)
        return True

    def event_wait(self, event: Any) -> None:
        """Block until the recorded work is complete, within the watch's bound (rules E3, E6)."""
        with self._watch.bounded("event_synchronize"):
            self.call("event_synchronize", event)

    def stream_wait(self, stream: Any) -> None:
        """Block until everything enqueued on the stream is complete, within the watch's bound."""
        with self._watch.bounded("stream_synchronize"):
            self.call("stream_synchronize", stream)


class ImmediateDriver:
    """The table of a device that finishes work before the call that launches it returns: nothing is ever pending."""

    def __init__(self) -> None:
        self._handles = 0

    def _handle(self) -> tuple[int, int]:
        self._handles += 1
        return Status.SUCCESS, self._handles

    def stream_priority_range(self) -> tuple[int, int, int]:
        return Status.SUCCESS, 0, 0

    def stream_create(self, flags: int, priority: int) -> tuple[int, int]:
        return self._handle()

    def stream_destroy(self, stream: Any) -> tuple[int]:
        return (Status.SUCCESS,)

    def stream_synchronize(self, stream: Any) -> tuple[int]:
        return (Status.SUCCESS,)

    def stream_wait_event(self, stream: Any, event: Any) -> tuple[int]:
        return (Status.SUCCESS,)

    def sm_resource(self) -> tuple[int, Any]:
        return Status.INVALID_VALUE, None

    def sm_split(self, resource: Any, sms: int) -> tuple[int, Any, Any]:
        return Status.INVALID_VALUE, None, None

    def sm_count(self, resource: Any) -> tuple[int, int]:
        return Status.INVALID_VALUE, 0

    def resource_descriptor(self, resource: Any) -> tuple[int, Any]:
        return Status.INVALID_VALUE, None

    def green_ctx_create(self, descriptor: Any) -> tuple[int, Any]:
        return Status.INVALID_VALUE, None

    def green_ctx_destroy(self, green_ctx: Any) -> tuple[int]:
        return (Status.INVALID_VALUE,)

    def green_ctx_stream_create(self, green_ctx: Any, flags: int, priority: int) -> tuple[int, Any]:
        return Status.INVALID_VALUE, None

    def green_ctx_record_event(self, green_ctx: Any, event: Any) -> tuple[int]:
        return (Status.INVALID_VALUE,)

    def event_create(self, flags: int) -> tuple[int, int]:
        return self._handle()

    def event_record(self, event: Any, stream: Any) -> tuple[int]:
        return (Status.SUCCESS,)

    def event_query(self, event: Any) -> tuple[int]:
        return (Status.SUCCESS,)

    def event_synchronize(self, event: Any) -> tuple[int]:
        return (Status.SUCCESS,)

    def event_elapsed_ms(self, start: Any, end: Any) -> tuple[int, float]:
        return Status.SUCCESS, 0.0

    def event_destroy(self, event: Any) -> tuple[int]:
        return (Status.SUCCESS,)


Abort = Callable[[str, BaseException | None], Any]
"""`fail_stop.abort`: ends the process; in tests it raises instead."""
