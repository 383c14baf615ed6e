"""The running sequences' numbers by slot, as numpy columns, so that a step of 256 rows is a few array operations.

Owns the columns, the newest ids of each row and the slots themselves. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_core.cache.pages import Pages
from engine_core.cache.retire import RetireQueue
from engine_core.request import Ids
from engine_core.scheduling.sequence import Sequence, SequenceState
from engine_core.step import Lane

Slots = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

EMPTY, DECODE = int(SequenceState.WAITING), int(SequenceState.DECODE)
STRETCH_PAGES = 8
"""Pages whose ids a row gathers before the sequence takes them over and publishes them; a visit costs as much as two
pages. A row that ends or is preempted is visited anyway."""


@dataclass(frozen=True, slots=True)
class SessionRows:
    """The rows of a group that belong to one session."""

    session: int
    numbers: npt.NDArray[np.uint64]
    index: Slots | None
    """Their places in the group; None: all of it."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are planned and answered together, with what doesn't change while they are in their slots.

    Steady decode plans the same rows again and again, so this is gathered once for many steps.
    """

    slots: Slots
    packed_slots: bytes
    """int32 LE."""
    serials: npt.NDArray[np.int64]
    sessions: tuple[SessionRows, ...]
    recent: npt.NDArray[np.int64]
    """Where each row's newest ids begin."""
    stop_ids: npt.NDArray[np.int32] | None
    """Rows x ids, padded with -1; None: no row stops at an id."""
    stoppable: Positions
    departures: int
    """Of the table when the rows were gathered."""


class RowTable:
    """One row a slot. All lengths are in tokens from the sequence's start."""

    def __init__(self, slots: int, page_size: int, max_pages: int) -> None:
        self.page_size = page_size
        self.stretch = STRETCH_PAGES * page_size
        """Tokens between two takeovers of a row's ids, at multiples of this."""
        self.version = 0
        """Moves with every change of a phase: whoever gathered rows by phase has to look again."""
        self.departures = 0
        """Rows that have left their slots so far."""
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
        self.last_fed = np.zeros(slots, np.int32)
        """The position whose token ends the row by its length: nothing is planned for it."""
        self.due = np.zeros(slots, np.int32)
        """The next position whose token calls for more than being stored: it ends a stretch or the row."""
        self.stoppable = np.zeros(slots, np.int32)
        """Position from which on a stop id counts: prompt + min_tokens."""
        self.constrained = np.zeros(slots, np.bool_)
        """The row follows a grammar: which tokens may come next is known only behind its last one."""
        self.held = np.zeros(slots, np.bool_)
        """A constrained row was late, and the worker hasn't said that it may be planned again."""
        self.constrained_rows = 0
        self.capacity = np.zeros(slots, np.int32)
        """Tokens that the row's pages hold."""
        self.pages = np.zeros((slots, max_pages), np.int32)
        self.fences = {lane: np.zeros(slots, np.int64) for lane in Lane}
        """The last step submitted with work of the row, by lane."""
        self.applied = dict.fromkeys(Lane, 0)
        """The last step whose results are applied, by lane."""
        self._recent = np.zeros(slots * 2 * self.stretch, np.int32)
        """The newest ids of each slot, each at its position modulo two stretches."""
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
        self.last_fed[slot] = sequence.limit - 1
        self.stoppable[slot] = sequence.prompt_len + sequence.params.min_tokens
        self.constrained[slot] = sequence.family.grammar != 0
        self.constrained_rows += int(self.constrained[slot])
        self.held[slot] = False
        self.pages[slot, : pages.size] = pages
        self.capacity[slot] = pages.size * self.page_size
        for fence in self.fences.values():
            fence[slot] = 0
        self._set_due(slot, sequence.stored)
        self._set_stop_ids(slot, stop_ids)
        return slot

    def set_phase(self, slot: int, state: SequenceState) -> None:
        self.phase[slot] = state
        self.version += 1

    def leave(self, slot: int) -> None:
        """The row is no one's from now on; the slot is free again when all lanes have passed its fences (rule O12)."""
        self.phase[slot] = EMPTY
        self.serial[slot] = 0
        self.constrained_rows -= int(self.constrained[slot])
        self.constrained[slot] = False
        self.version += 1
        self.departures += 1
        self._free.extend(self._retired.retire(slot, self.fence(slot)))

    def complete(self, proof: Mapping[Lane, int]) -> None:
        """The lanes are proven done up to these sequences."""
        self._free.extend(self._retired.complete(proof))

    def hold(self, slot: int) -> None:
        """The row drew nothing in a step: it feeds the same position again, once it is released."""
        self.computed[slot] -= 1
        self.held[slot] = True

    def release(self, slots: list[int]) -> None:
        self.held[slots] = False

    def fence(self, slot: int) -> dict[Lane, int]:
        return {lane: int(column[slot]) for lane, column in self.fences.items()}

    def settled(self, slot: int) -> bool:
        """Whether the results of all work submitted for the row are applied."""
        return all(column[slot] <= self.applied[lane] for lane, column in self.fences.items())

    # -------------------------- groups

    def decoding(self) -> RowGroup:
        """The rows in decode, without those that have been planned up to their end.

        Of those that follow a grammar only the ones whose last token is back, and which aren't held.
        """
        ready = (self.phase == DECODE) & (self.computed < self.last_fed)
        if self.constrained_rows:
            ready &= ~self.constrained | ((self.computed < self.known) & ~self.held)
        return self.group(ready.nonzero()[0])

    def group(self, slots: Slots) -> RowGroup:
        """Gather rows; the slots are distinct."""
        stop_ids = self._stop_ids[slots]
        return RowGroup(
            slots=slots,
            packed_slots=slots.astype("<i4").tobytes(),
            serials=self.serial[slots],
            sessions=tuple(self._sessions(slots)),
            recent=slots * (2 * self.stretch),
            stop_ids=stop_ids if (stop_ids >= 0).any() else None,
            stoppable=self.stoppable[slots],
            departures=self.departures,
        )

    def _sessions(self, slots: Slots) -> Iterator[SessionRows]:
        sessions, numbers = self.session[slots], self.number[slots]
        if slots.size == 0:
            return
        if (sessions == sessions[0]).all():
            yield SessionRows(int(sessions[0]), numbers, None)
            return
        order = np.argsort(sessions, kind="stable")
        for index in np.split(order, np.flatnonzero(np.diff(sessions[order])) + 1):
            yield SessionRows(int(sessions[index[0]]), numbers[index], index)

    def departed(self, group: RowGroup) -> Mask | None:
        """Which of a group's rows have left their slots since; None: none of them."""
        if group.departures == self.departures:
            return None
        gone: Mask = self.serial[group.slots] != group.serials
        return gone if gone.any() else None

    # -------------------------- pages

    def row_pages(self, slot: int) -> Pages:
        return self.pages[slot, : self.capacity.item(slot) // self.page_size].copy()

    def page_counts(self, slots: Slots) -> Positions:
        counts: Positions = self.capacity[slots] // self.page_size
        return counts

    def append_pages(self, slots: Slots, counts: Positions, pages: Pages) -> None:
        """One more page for each of the slots, which are distinct and have so many."""
        self.pages[slots, counts] = pages
        self.capacity[slots] = (counts + 1) * self.page_size

    def drop_pages(self, slot: int) -> None:
        self.capacity[slot] = 0

    # -------------------------- ids

    def append_ids(self, group: RowGroup, tokens: Ids) -> Positions:
        """Take over one drawn token a row; returns the positions that they stand at."""
        positions = self.known[group.slots]
        self.known[group.slots] = positions + 1
        self._recent[group.recent + positions % (2 * self.stretch)] = tokens
        return positions

    def stretch_before(self, slot: int, end: int) -> bytes:
        """The ids (int32 LE) of the stretch that ends before a position; those from before the row are missing."""
        return self._ids_at(slot, end - self.stretch, self.stretch)

    def unstored(self, sequence: Sequence) -> bytes:
        """The row's ids (int32 LE) that the sequence doesn't hold yet: those since the last takeover."""
        stored = sequence.stored
        return self._ids_at(sequence.slot, stored, self.known.item(sequence.slot) - stored)

    def _ids_at(self, slot: int, position: int, count: int) -> bytes:
        """Ids within one stretch."""
        start = slot * 2 * self.stretch + position % (2 * self.stretch)
        return self._recent[start : start + count].tobytes()

    def call_again(self, slot: int, position: int) -> None:
        """The token at `position` was seen to."""
        self._set_due(slot, position + 1)

    def _set_due(self, slot: int, position: int) -> None:
        self.due[slot] = min(-(-position // self.stretch) * self.stretch, self.last_fed.item(slot))

    def stops(self, group: RowGroup, tokens: Ids, positions: Positions) -> Mask | None:
        """Which of the tokens end their row by an eos or stop id; None: none of them."""
        if group.stop_ids is None:
            return None
        matches = group.stop_ids == tokens[:, np.newaxis]
        if not matches.any():
            return None
        stopped: Mask = matches.any(axis=1) & (positions >= group.stoppable)
        return stopped

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        width = self._stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((len(self._stop_ids), len(stop_ids)), -1, np.int32)
            wider[:, :width] = self._stop_ids
            self._stop_ids = wider
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stop_ids)] = stop_ids
