"""The gRPC stream of an open session: how its reader and its writer are woken, and how it is ended.

Owns the alarm and the reason of the end; `service.py` reads and writes, `session.py` knows what the messages mean.
"""

from __future__ import annotations

import asyncio

from engine_core.session import Session, SessionBroken


class SessionStream:
    """An open session and its tasks' way to be woken and ended."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.changed = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle = asyncio.Event()
        """No write is under way."""
        self.idle.set()
        self.leaving = False
        """No further write shall begin."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0

    def wake_by(self, due: float, now: float) -> None:
        """Have `changed` be set by then. An alarm that would come earlier stays: a busy session sets few."""
        if self._alarm is not None:
            if self._alarm_at <= due:
                return
            self._alarm.cancel()
        self._alarm_at = due
        self._alarm = asyncio.get_running_loop().call_later(max(0.0, due - now), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.changed.set()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def end(self, reason: SessionBroken) -> None:
        """Have the session end with this status; the first reason stays."""
        if not self.ended.done():
            self.ended.set_exception(reason)
