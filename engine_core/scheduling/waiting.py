"""The queue of sequences that hold no slot, in order of (priority, arrival).

Owns the bound on new arrivals. Decides nothing about who can run: that is the scheduler's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from engine_core.errors import Rejected, RejectReason
from engine_core.scheduling.sequence import Sequence, SequenceState

RETRY_AFTER_S = 1.0


class WaitingQueue:
    """Closed sequences may linger inside; they count for nothing."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def reserve(self, count: int, free_rows: int) -> None:
        """Raise Rejected unless `count` new sequences fit, all of them; reserves by being followed by `push`es.

        Those that `free_rows` are there for pass through the queue and count for nothing.
        """
        if count > self._capacity:
            raise Rejected(
                RejectReason.NEVER_FITS,
                f"n is {count}; the queue holds {self._capacity} sequences (--max-queue): lower n",
                "n",
            )
        if self._count + count > self._capacity + free_rows:
            raise Rejected(
                RejectReason.QUEUE_FULL,
                f"{self._count} sequences wait and {count} more exceed the queue of {self._capacity} (--max-queue); "
                "try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    def push(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences. A preempted one comes back even when the queue is full: it was accepted long ago."""
        for sequence in sequences:
            heapq.heappush(self._heap, (sequence.order, sequence))
            self._count += 1

    def hold(self, count: int) -> None:
        """New sequences have a place in the queue, and stand outside of it until `release`."""
        self._count += count

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Held sequences take their places, as far as they weren't closed meanwhile."""
        for sequence in sequences:
            if sequence.state is SequenceState.WAITING:
                heapq.heappush(self._heap, (sequence.order, sequence))

    def head(self) -> Sequence | None:
        """The first in order, or None."""
        while self._heap and self._heap[0][1].state is not SequenceState.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take the first in order out of the queue."""
        head = self.head()
        if head is None:
            raise IndexError("the queue is empty")
        heapq.heappop(self._heap)
        self._count -= 1
        return head

    def closed(self) -> None:
        """A waiting sequence was closed where it stands."""
        self._count -= 1
        if len(self._heap) > 2 * self._count + 64:
            self._heap = [entry for entry in self._heap if entry[1].state is SequenceState.WAITING]
            heapq.heapify(self._heap)
