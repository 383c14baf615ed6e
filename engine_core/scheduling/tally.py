"""What the steps that have come back did: their kinds, and how long they kept their lanes busy.

Owns counters alone. A step counts when its result is applied, so kinds and steps in flight add up to steps submitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.scheduling.flight import Flight
from engine_core.step import StepResult


@dataclass(slots=True)
class Tally:
    """Monotonic. The kind says what the step's own forward, on the primary lane, computed."""

    steps_decode: int = 0
    steps_prefill: int = 0
    steps_mixed: int = 0
    """Decode rows and chunks of prompts in one forward."""
    steps_empty: int = 0
    """No forward: the step asked for a prefill batch, or only launched one."""
    primary_busy_us: int = 0
    prefill_busy_us: int = 0
    """Of batches on the prefill lane, from launch to join."""

    def add(self, flight: Flight, result: StepResult) -> None:
        """Count a plan and what its result says of time."""
        decodes, chunks = flight.rows.slots.size > 0, bool(flight.chunks)
        self.steps_mixed += decodes and chunks
        self.steps_decode += decodes and not chunks
        self.steps_prefill += chunks and not decodes
        self.steps_empty += not decodes and not chunks
        if decodes or chunks:  # an empty step's time is spent waiting for the other lane
            self.primary_busy_us += result.busy_us
        if not chunks:
            self.prefill_busy_us += sum(prefill.busy_us for prefill in result.prefills)
