"""Memory that more than one lane touches, kept alive until the last of them is proven done (rule O3).

Owns references only. Tensors that live and die on one lane don't belong here: the allocator orders those by itself.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from engine_core.step import Lane


class DropQueue:
    """References by lane, released in order of the lane's sequence."""

    def __init__(self) -> None:
        self._held: dict[Lane, deque[tuple[int, Any]]] = {lane: deque() for lane in Lane}

    def defer(self, held: Any, lane: Lane, sequence: int) -> None:
        """Keep `held` until `sequence` is proven complete on `lane`. Sequences of a lane never decrease."""
        queue = self._held[lane]
        if queue and queue[-1][0] > sequence:
            raise ValueError(f"sequence {sequence} was deferred after {queue[-1][0]} on lane {lane.name}")
        queue.append((sequence, held))

    def release(self, lane: Lane, proven: int) -> int:
        """Let go of everything up to `proven`; returns how many references that were."""
        queue, released = self._held[lane], 0
        while queue and queue[0][0] <= proven:
            queue.popleft()
            released += 1
        return released

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._held.values())
