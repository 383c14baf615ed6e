"""The running sequences' numbers by slot, as numpy columns, so that a step of 256 rows is a few array operations.

Owns the columns, the newest ids of each row and the slots themselves. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from engine_core.cache.pages import Pages
from engine_core.cache.retire import RetireQueue
from engine_core.request import Ids
from engine_core.sequence import Sequence, SequenceState
from engine_core.step import Lane

Slots = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

EMPTY = int(SequenceState.WAITING)
STRETCH_PAGES = 4
"""Pages whose ids a row gathers before the sequence takes them over and publishes them: visits cost more than pages."""


class RowTable:
    """One row a slot. All lengths are in tokens from the sequence's start."""

    def __init__(self, slots: int, page_size: int, max_pages: int) -> None:
        self.page_size = page_size
        self.stretch = STRETCH_PAGES * page_size
        """Tokens between two takeovers of a row's ids, at multiples of this."""
        self.phase = np.full(slots, EMPTY, np.uint8)
        """The SequenceState of the row; EMPTY for a slot without one."""
        self.serial = np.zeros(slots, np.int64)
        """The sequence's serial; 0 for a slot without one."""
        self.session = np.zeros(slots, np.int64)
        self.number = np.zeros(slots, np.uint64)
        self.computed = np.zeros(slots, np.int32)
        """Tokens whose KV is computed or scheduled: the position that the next plan feeds."""
        self.known = np.zeros(slots, np.int32)
        """Ids known here: prompt and applied output."""
        self.limit = np.zeros(slots, np.int32)
        """The length at which the sequence ends."""
        self.last_fed = np.zeros(slots, np.int32)
        """No decode row is planned for this position or a later one: limit - 1, whose token ends the sequence."""
        self.stoppable = np.zeros(slots, np.int32)
        """Position from which on a stop id counts: prompt + min_tokens."""
        self.capacity = np.zeros(slots, np.int32)
        """Tokens that the row's pages hold."""
        self.page_count = np.zeros(slots, np.int32)
        self.pages = np.zeros((slots, max_pages), np.int32)
        self.in_flight = np.zeros(slots, np.int32)
        """Decode rows and chunks submitted and not applied."""
        self.fences = {lane: np.zeros(slots, np.int64) for lane in Lane}
        """The last step submitted with work of the row, by lane."""
        self._recent = np.zeros((slots, 2, self.stretch), np.int32)
        """The newest ids, each at its position modulo two stretches."""
        self._stop_ids = np.full((slots, 1), -1, np.int32)
        self._free = list(range(slots - 1, -1, -1))
        self._retired: RetireQueue[int] = RetireQueue()

    # -------------------------- slots

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence, stop_ids: tuple[int, ...], pages: Pages, cached: int) -> int:
        """Give the sequence a free slot; its pages hold every id known so far, `cached` of them computed."""
        slot = self._free.pop()
        self.serial[slot] = sequence.serial
        self.session[slot] = sequence.request.session
        self.number[slot] = sequence.number
        self.computed[slot] = cached
        self.known[slot] = sequence.stored
        self.limit[slot] = sequence.limit
        self.last_fed[slot] = sequence.limit - 1
        self.stoppable[slot] = sequence.prompt_len + sequence.params.min_tokens
        self.page_count[slot] = pages.size
        self.pages[slot, : pages.size] = pages
        self.capacity[slot] = pages.size * self.page_size
        self.in_flight[slot] = 0
        for fence in self.fences.values():
            fence[slot] = 0
        self._set_stop_ids(slot, stop_ids)
        return slot

    def leave(self, slot: int) -> None:
        """The row is no one's from now on; the slot is free again when all lanes have passed its fences (rule O12)."""
        self.phase[slot] = EMPTY
        self.serial[slot] = 0
        self._free.extend(self._retired.retire(slot, self.fence(slot)))

    def complete(self, proof: Mapping[Lane, int]) -> None:
        """The lanes are proven done up to these sequences."""
        self._free.extend(self._retired.complete(proof))

    def fence(self, slot: int) -> dict[Lane, int]:
        return {lane: int(column[slot]) for lane, column in self.fences.items()}

    # -------------------------- pages

    def row_pages(self, slot: int) -> Pages:
        return self.pages[slot, : self.page_count[slot]].copy()

    def last_pages(self, slots: Slots) -> Pages:
        return self.pages[slots, self.page_count[slots] - 1]

    def append_pages(self, slots: Slots, pages: Pages) -> None:
        """One more page for each of the slots, which are distinct."""
        self.pages[slots, self.page_count[slots]] = pages
        self.page_count[slots] += 1
        self.capacity[slots] += self.page_size

    def drop_pages(self, slot: int) -> None:
        self.page_count[slot] = 0
        self.capacity[slot] = 0

    # -------------------------- ids

    def append_ids(self, slots: Slots, tokens: Ids) -> npt.NDArray[np.int32]:
        """Take over one drawn token a row; returns the positions that they stand at."""
        positions = self.known[slots]
        stretches, offsets = np.divmod(positions, self.stretch)
        self._recent[slots, stretches & 1, offsets] = tokens
        self.known[slots] = positions + 1
        return positions

    def stretch_before(self, slot: int, end: int) -> bytes:
        """The ids (int32 LE) of the stretch that ends before a position; those from before the row are missing."""
        ids: bytes = self._recent[slot, end // self.stretch - 1 & 1].tobytes()
        return ids

    def unstored(self, sequence: Sequence) -> bytes:
        """The row's ids (int32 LE) that the sequence doesn't hold yet, at most a stretch since the last takeover."""
        stretch, start = divmod(sequence.stored, self.stretch)
        count = self.known.item(sequence.slot) - sequence.stored
        ids: bytes = self._recent[sequence.slot, stretch & 1, start : start + count].tobytes()
        return ids

    def stops(self, slots: Slots, tokens: Ids, positions: npt.NDArray[np.int32]) -> Mask:
        """Which of the tokens end their row by an eos or stop id."""
        matches: Mask = (self._stop_ids[slots] == tokens[:, None]).any(axis=1)
        return matches & (positions >= self.stoppable[slots])

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        width = self._stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((len(self._stop_ids), len(stop_ids)), -1, np.int32)
            wider[:, :width] = self._stop_ids
            self._stop_ids = wider
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stop_ids)] = stop_ids
