"""A small model of what steps take: tables measured at start, terms for context, corrections learned while running.

Owns the predictions, in microseconds, and what is learned from steps that were run; `policy.py` owns the choice that
follows. Every kind of work has a correction of its own, on every partition: the measured over the predicted, averaged
over recent steps. Where a partition hasn't been seen at work the others' is taken: what slows one down, a card that is
hot, say, slows them all, and one that looks faster only for being unknown would be chosen for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from engine_core.step import StepTimes

LEARNING, BATCH_LEARNING = 0.15, 0.5
"""Weight of a new observation in a correction: there are dozens of steps to a batch on the prefill lane, and what that
takes is known better than what one step does."""
CORRECTION = (0.5, 3.0)
"""A correction stays within these: one stalled step must not switch prefill off."""


class Work(Enum):
    """Kinds of work, each with its own correction."""

    DECODE = "decode"
    """A step of decode rows alone on the whole GPU."""
    MIXED = "mixed"
    """A step of decode rows with a chunk in the same forward."""
    BESIDE = "beside"
    """A decode step on its partition, beside a prefill."""
    BATCH = "batch"
    """A batch on the prefill lane, beside decode."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step would hold."""

    rows: int
    """Decode rows."""
    context: int
    """Tokens of KV that they read together."""
    remaining: int
    """Prompt tokens to compute, of all that wait."""
    first: int
    """Those of the prompt that is next."""
    history: int
    """Tokens of that prompt's KV that are computed already."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Work that was run, and what it took."""

    work: Work
    load: Load
    tokens: int
    """Of chunks."""
    busy_us: int
    partition: int = 0
    """In force, for work on it."""


class StepModel:
    """Predictions from `StepTimes`. A row count or a chunk between two sizes counts as the larger."""

    def __init__(self, times: StepTimes, token_budget: int) -> None:
        self._times = times
        self._token_budget = token_budget
        self._decode = _columns(times.decode)
        self._beside = [_columns(partition.decode) for partition in times.partitions]
        self._prefill = [_columns(partition.prefill) for partition in times.partitions]
        self._reading_ns = [_columns(partition.reading) for partition in times.partitions]
        self._history_ns = _columns(times.history)
        self._mixed: dict[int, list[tuple[int, int]]] = {}
        for rows, tokens, us in times.mixed:
            self._mixed.setdefault(rows, []).append((tokens, us))
        self._mixed_rows = sorted(self._mixed)
        self._corrections: dict[tuple[Work, int], float] = {}

    @property
    def partitions(self) -> range:
        return range(len(self._times.partitions))

    def sizes(self, rows: int) -> list[int]:
        """Tokens of the chunks that can stand beside so many decode rows, ascending: with them no more than a step may
        have."""
        room = max(1, self._token_budget - rows)
        return list(dict.fromkeys(min(tokens, room) for tokens, _ in self._sizes(rows)))

    def decode(self, load: Load) -> float:
        us = _at_least(self._decode, load.rows) + self._reading(load)
        return self._correction(Work.DECODE) * us

    def beside(self, load: Load, partition: int) -> float:
        us = _at_least(self._beside[partition], load.rows)
        reading_us = 1e-3 * _at_least(self._reading_ns[partition], load.rows) * load.context
        return self._correction(Work.BESIDE, partition) * (us + reading_us)

    def mixed(self, load: Load, tokens: int) -> float:
        us = next(us for size, us in self._sizes(load.rows) if size >= tokens)
        return self._correction(Work.MIXED) * (us + self._reading(load) + self._history(load, tokens))

    def batch(self, load: Load, tokens: int, partition: int) -> float:
        """In proportion to its tokens above the largest size."""
        us = _beyond(self._prefill[partition], tokens)
        return self._correction(Work.BATCH, partition) * (us + self._history(load, tokens))

    def observe(self, observed: Observed) -> None:
        """Move the correction of that kind of work."""
        predicted, which = self._predict(observed), (observed.work, observed.partition)
        if predicted is None:
            return
        weight = BATCH_LEARNING if observed.work is Work.BATCH else LEARNING
        moved = self._correction(*which) * (1 + weight * (observed.busy_us / predicted - 1))
        self._corrections[which] = min(max(moved, CORRECTION[0]), CORRECTION[1])

    def _correction(self, work: Work, partition: int = 0) -> float:
        own = self._corrections.get((work, partition))
        if own is not None:
            return own
        others = [correction for (kind, _), correction in self._corrections.items() if kind is work]
        return sum(others) / len(others) if others else 1.0

    def _predict(self, observed: Observed) -> float | None:
        """None where there is nothing to compare with: no decode row, or a chunk that no decode row waits for."""
        load, tokens = observed.load, observed.tokens
        match observed.work:
            case Work.BATCH:
                return self.batch(load, tokens, observed.partition)
            case Work.DECODE if load.rows:
                return self.decode(load)
            case Work.BESIDE if load.rows:
                return self.beside(load, observed.partition)
            case Work.MIXED if load.rows and tokens <= self._sizes(load.rows)[-1][0]:
                return self.mixed(load, tokens)
        return None

    def _reading(self, load: Load) -> float:
        return self._times.context_ns * 1e-3 * load.context

    def _history(self, load: Load, tokens: int) -> float:
        return _beyond(self._history_ns, tokens) * 1e-3 * load.history

    def _sizes(self, rows: int) -> list[tuple[int, int]]:
        return self._mixed[self._mixed_rows[min(bisect_left(self._mixed_rows, rows), len(self._mixed_rows) - 1)]]


Table = tuple[list[int], list[float]]
"""Sizes, ascending, and what each takes."""


def _columns(rows: Sequence[tuple[int, float]]) -> Table:
    return [size for size, _ in rows], [value for _, value in rows]


def _at_least(table: Table, size: int) -> float:
    """The value of the smallest size that is no smaller, or of the largest."""
    sizes, values = table
    return values[min(bisect_left(sizes, size), len(sizes) - 1)]


def _beyond(table: Table, size: int) -> float:
    """The value of the smallest size that is no smaller; in proportion above the largest."""
    sizes, values = table
    index = bisect_left(sizes, size)
    return values[index] if index < len(values) else values[-1] * size / sizes[-1]
