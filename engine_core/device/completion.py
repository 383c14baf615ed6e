"""Waiting for a completion without polling: a thread blocks in the driver and wakes the loop (rule E6).

Owns the thread. Proves nothing: the loop queries the completion itself, so an error is found where it is handled.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from engine_core.device.driver import DriverTable
from engine_core.device.lanes import Completion


class CompletionThread:
    """Blocks for one completion after the other. While `Completion.watched` is set its event may not be destroyed."""

    def __init__(self, table: DriverTable, wake: Callable[[], None]) -> None:
        self._table = table
        self._wake = wake
        self._queue: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="completions", daemon=True)
        self._started = False

    def watch(self, completion: Completion) -> None:
        """Wake the loop once this completion has ended, in success or error. Watching it twice is once."""
        if completion.watched:
            return
        if not self._started:
            self._thread.start()
            self._started = True
        completion.watched = True
        self._queue.put(completion)

    def close(self) -> None:
        """End the thread; every watched completion has ended."""
        if self._started:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (completion := self._queue.get()) is not None:
            self._table.event_synchronize(completion.event)
            completion.watched = False
            self._wake()
