"""Rows whose mask isn't there when their step is launched: left out of it, so that the others don't wait.

Owns which rows the core has been told are late, and when it hears that they may be planned again. A late decode row
isn't in the step's forward at all; the chunk of a late row is computed and draws nothing, and counts as one token
shorter than it was planned, since drawing takes the state of its last position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine_core.device.base import Int32
from engine_core.step import StepPlan

if TYPE_CHECKING:
    from engine_core.worker.unconstrained import Constraints


@dataclass(frozen=True, slots=True)
class Drawing:
    """A plan's rows by whether they can draw in it."""

    decode: Int32
    """Slots of the decode rows that are in the forward."""
    late: list[int]
    """Slots of those that aren't."""
    late_chunks: list[int]
    """Slots of rows that would have drawn behind their chunk."""


class LateRows:
    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints
        self._told: list[int] = []

    def sort(self, plan: StepPlan, decode: Int32) -> Drawing:
        """Which rows can draw. The plan's rows are started; their masks must be taken before others are begun."""
        chunks = np.array([chunk.slot for chunk in plan.chunks if chunk.last], np.int32)
        late = self._constraints.late(np.concatenate((decode, chunks)) if len(chunks) else decode)
        if not late:
            return Drawing(decode, late, late)
        left_out = np.isin(decode, late)
        return Drawing(decode[~left_out], decode[left_out].tolist(), chunks[np.isin(chunks, late)].tolist())

    def told(self, slots: list[int]) -> None:
        """A result that names these rows as late is on its way: the core plans them again once `caught_up` has."""
        self._told += slots

    def caught_up(self, now: float) -> list[int]:
        """Slots of these rows that can draw now, or whose time is up, so that planning them refuses them."""
        if not self._told:
            return self._told
        waiting = [slot for slot in self._told if self._until(slot, now) > now]
        ready = [slot for slot in self._told if slot not in waiting]
        self._told = waiting
        return ready

    def next_deadline(self, now: float) -> float | None:
        """When the first of these rows' time is up."""
        return min((self._until(slot, now) for slot in self._told), default=None)

    def _until(self, slot: int, now: float) -> float:
        until = self._constraints.awaited_until(slot)
        return now if until is None else until
