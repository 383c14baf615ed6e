"""The record that every accepted sequence gets exactly one terminal outcome.

Owns the counters that must reconcile: accepted = stop + length + abort + error + open. Raises `LedgerError` for an
outcome of a sequence that isn't open, which is how a double or a forgotten finish shows itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine_core.request import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from engine_core.scheduling.outputs import Events, Started
from engine_core.scheduling.sequence import Ended, Sequence


class LedgerError(Exception):
    """A sequence was accepted twice, ended twice, or ended without having been accepted: a bug."""


@dataclass(slots=True)
class Counts:
    """Monotonic; sequences and tokens."""

    sequences_accepted: int = 0
    sequences_rejected: int = 0
    sequences_started: int = 0
    queue_wait_us: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


_COUNTERS = {
    FINISH_STOP: "finished_stop",
    FINISH_LENGTH: "finished_length",
    FINISH_ABORT: "finished_abort",
    FINISH_ERROR: "finished_error",
}


class Ledger:
    """Sequences by the engine's own serial."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._open: set[int] = set()

    @property
    def open_count(self) -> int:
        return len(self._open)

    def accept(self, sequences: Iterable[Sequence], now: float) -> None:
        for sequence in sequences:
            if sequence.serial in self._open:
                raise LedgerError(f"sequence {sequence.serial} was accepted twice")
            self._open.add(sequence.serial)
            sequence.queued_at = now
            self.counts.sequences_accepted += 1

    def reject(self, sequences: int) -> None:
        self.counts.sequences_rejected += sequences

    def start(self, started: Started, now: float) -> None:
        """Its time in the queue ends. Prompt tokens count once, those from the prefix cache among them."""
        self.counts.sequences_started += 1
        self.counts.queue_wait_us += round((now - started.queued_at) * 1e6)
        self.counts.prompt_tokens += started.prompt_tokens
        self.counts.cached_tokens += started.cached_tokens

    def commit(self, events: Events) -> None:
        """Count a result's tokens and book its terminal outcomes."""
        self.counts.output_tokens += sum(columns.tokens.size for columns in events.tokens)
        self.finish(events.ended)

    def finish(self, ended: Iterable[Ended]) -> None:
        """Book terminal outcomes. Raises LedgerError for a sequence that isn't open."""
        for outcome in ended:
            if outcome.serial not in self._open:
                raise LedgerError(f"sequence {outcome.serial} ended, and wasn't open")
            self._open.remove(outcome.serial)
            counter = _COUNTERS[outcome.finish.reason]
            setattr(self.counts, counter, getattr(self.counts, counter) + 1)
