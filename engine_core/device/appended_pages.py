"""Pages appended to rows since the primary lane was last given work: what is enqueued next there takes them along.

Owns what hasn't been taken along yet. A step of late rows alone, or one that fails early, enqueues nothing: so pages
can outlast their row here, and must not come behind the tables of the next row in its slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine_core.device.base import Int32

Append = tuple[Int32, Int32, Int32]
"""pages[i] stands in row slots[i] at columns[i]: (slots, columns, pages)."""


class AppendedPages:
    def __init__(self) -> None:
        self._waiting: list[Append] = []

    def add(self, slots: Int32, columns: Int32, pages: Int32) -> None:
        if len(slots):
            self._waiting.append((slots, columns, pages))

    def forget(self, slots: Sequence[int]) -> None:
        """Other rows start in these slots."""
        kept = [~np.isin(waiting[0], slots) for waiting in self._waiting]
        self._waiting = [
            (rows[keep], columns[keep], pages[keep])
            for (rows, columns, pages), keep in zip(self._waiting, kept, strict=True)
        ]

    def __iter__(self) -> Iterator[Append]:
        """In the order in which they came."""
        return iter(self._waiting)

    def clear(self) -> None:
        """All of them are taken along."""
        self._waiting.clear()
