"""Start-up progress on its way to the engine core.

Owns how often it is told. A model has hundreds of tensors, and a queue of frames that nobody reads in time ends the
worker: so of each stage the first and the last report are sent, and others no more often than every PROGRESS_S. One
that finds no room is dropped: the next says more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from engine_core.errors import ProtocolViolation
from engine_core.executor.channel import Loading

PROGRESS_S = 0.1


class LoadingReports:
    """Takes every report, sends few."""

    def __init__(self, send: Callable[[Loading], None], now: Callable[[], float]) -> None:
        self._send = send
        self._now = now
        self._what = ""
        self._due = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report progress; units are the reporter's, `total` 0 means unknown."""
        now, ended = self._now(), 0 < total <= done
        if what == self._what and not ended and now < self._due:
            return
        self._what, self._due = what, now + PROGRESS_S
        with contextlib.suppress(ProtocolViolation):
            self._send(Loading(what, done, total))
