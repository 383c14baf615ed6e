"""Decides which rows decode in the next plan, and who gives way when pages run short.

Owns the rows gathered for it. Decode rows come before prompts, one token each; the budget covers all of them.
"""

from __future__ import annotations

import numpy as np

from engine_core.scheduling.open_sequences import OpenSequences
from engine_core.scheduling.residency import Residency
from engine_core.scheduling.rows import DECODE, RowGroup, Slots
from engine_core.scheduling.sequence import SequenceState


class DecodePlanner:
    """The decode half of every plan. A plan with rows is submitted before the next is asked for."""

    def __init__(self, residency: Residency, sequences: OpenSequences) -> None:
        self._residency = residency
        self._sequences = sequences
        self._rows = residency.rows
        self._pool = residency.pool
        self._group = self._rows.decoding()
        """The rows that decode, gathered for as many plans as they stay the same …"""
        self._version = self._rows.version
        self._plans = 0
        """… which is so many more: until the first of them is planned up to its end, or a phase changes."""

    def plan(self) -> tuple[RowGroup, Slots, bytes]:
        """Rows that decode, the slots that get a page for it, and those pages.

        A row isn't planned past the length at which it ends anyway. When some row has to wait for a page, none is left
        for newcomers.
        """
        rows, group = self._rows, self._gathered()
        needy = group.slots[rows.computed[group.slots] >= rows.capacity[group.slots]]
        if needy.size == 0:
            return group, needy, b""
        if needy.size <= self._pool.available:
            return group, needy, self._residency.grow(needy)
        grown = self._share_out(needy)
        page_ids = self._residency.grow(grown)
        slots = group.slots
        ready = (rows.phase[slots] == DECODE) & (rows.computed[slots] < rows.capacity[slots])
        self._plans = 0
        return rows.group(slots[ready]), grown, page_ids

    def _gathered(self) -> RowGroup:
        """The rows that can be in the next plan, as far as pages allow: with every step others, where rows follow a
        grammar."""
        rows = self._rows
        if self._version != rows.version or self._plans <= 0 or rows.constrained_rows:
            self._group, self._version = rows.decoding(), rows.version
            slots = self._group.slots
            self._plans = int((rows.last_fed[slots] - rows.computed[slots]).min()) if slots.size else 0
        self._plans -= 1
        return self._group

    def _share_out(self, needy: Slots) -> Slots:
        """Which of the rows get a page now that there aren't enough: in order, preempting from the other end.

        Pages that are retiring will come by themselves, so a row waits for one of them rather than preempt. A row never
        preempts one before it, so the first in order always gets its page, at the latest when the preempted rows' steps
        are proven complete.
        """
        grown: list[int] = []
        awaiting = 0
        for sequence in sorted((self._sequences.owner(slot) for slot in needy.tolist()), key=lambda s: s.order):
            if sequence.state is not SequenceState.DECODE:
                continue
            while len(grown) >= self._pool.available and awaiting >= self._pool.retiring:
                victim = max(self._sequences.evictable(), key=lambda s: s.order)
                if victim is sequence:
                    break
                self._sequences.park(victim)
            if len(grown) < self._pool.available:
                grown.append(sequence.slot)
            else:
                awaiting += 1
        return np.array(grown, np.int64)
