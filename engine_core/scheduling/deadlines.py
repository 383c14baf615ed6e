"""Which open sequence has to end next because its time is up.

Owns the order of deadlines. Reads no clock.
"""

from __future__ import annotations

import heapq

from engine_core.scheduling.sequence import Sequence, SequenceState


class Deadlines:
    """Closed sequences may linger inside, at most about as many as are open."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def add(self, sequence: Sequence, open_count: int) -> None:
        """Watch a sequence whose request has a deadline; `open_count` bounds what lingers."""
        if sequence.request.deadline is None:
            return
        heapq.heappush(self._heap, (sequence.request.deadline, sequence.serial, sequence))
        if len(self._heap) > 2 * open_count + 64:
            self._heap = [entry for entry in self._heap if entry[2].state is not SequenceState.CLOSED]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest deadline of an open sequence, or None."""
        while self._heap and self._heap[0][2].state is SequenceState.CLOSED:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Sequence]:
        """Open sequences whose deadline has come; each is named once."""
        expired: list[Sequence] = []
        while (deadline := self.next()) is not None and deadline <= now:
            expired.append(heapq.heappop(self._heap)[2])
        return expired
