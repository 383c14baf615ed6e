"""How many prompt tokens a step computes, and on which lane: pure functions of the load and of measured step times.

Owns the choice that `--decode-overlap` names. `off`, `stream` and `green` are fixed; `auto` asks `StepTimes` what each
way would take and picks the one that finishes the prompt soonest while decode rows keep their target:

* no decode rows: the whole GPU, in chunks that soon let the first rows decode;
* a chunk in the decode rows' own forward, of the largest size whose step stays within the target;
* a batch on the prefill lane, if decode on its partition stays within the target.

Where nothing stays within the target, the way with the shortest decode step is taken: prompts always get on. And where
prompts pile up so that the last would wait longer than the target of the time to first token, chunks grow until it
doesn't, or can't: under such a load a decode step costs more, and everybody's answer is sooner complete.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine_core.step import MOST_PRIMARY_TOKENS, StepTimes

TARGET_FACTOR = 1.8
"""Without `--itl-target-ms`: a decode step may take so many times as long as it would alone."""
TTFT_TARGET_MS = 400.0
"""Without `--ttft-target-ms` and `--itl-target-ms`: how long prompts may take, all that wait together."""
MARGIN = 0.92
"""Of the target, for what the model doesn't know."""
LEARNING = 0.1
"""Weight of a new observation in a correction."""
CORRECTION = (0.5, 3.0)
"""A correction stays within these: one stalled step must not switch prefill off."""


class Way(Enum):
    """Where a step's chunks are computed."""

    ALONE = "alone"
    """No decode row waits: the whole GPU."""
    MIXED = "mixed"
    """In the decode rows' own forward."""
    LANE = "lane"
    """On the prefill lane, beside decode."""


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
class Choice:
    """Up to `tokens` prompt tokens, computed that way."""

    tokens: int
    way: Way


@dataclass(frozen=True, slots=True)
class Observed:
    """A step that ran with nothing beside it."""

    load: Load
    tokens: int
    """Of chunks in its forward."""


class PrefillPolicy(Protocol):
    def choose(self, load: Load) -> Choice:
        """For the step that is being planned."""

    def observe(self, observed: Observed, busy_us: int) -> None:
        """What a step took."""


class FixedPolicy:
    """The same for every load: mixed in one forward, or, with `lane`, beside decode."""

    def __init__(self, token_budget: int, *, lane: bool) -> None:
        self._token_budget = token_budget
        self._lane = lane

    def choose(self, load: Load) -> Choice:
        if not load.rows:
            return Choice(self._token_budget, Way.ALONE)
        return Choice(self._token_budget, Way.LANE) if self._lane else Choice(self._token_budget - load.rows, Way.MIXED)

    def observe(self, observed: Observed, busy_us: int) -> None:
        """Nothing depends on it."""


class AutoPolicy:
    """`auto`: see the module. Times are microseconds."""

    def __init__(
        self, token_budget: int, times: StepTimes, itl_target_ms: float | None, ttft_target_ms: float | None
    ) -> None:
        """An ITL target alone is kept whatever waits; without any, decode's lone pace and TTFT_TARGET_MS are."""
        if ttft_target_ms is None and itl_target_ms is None:
            ttft_target_ms = TTFT_TARGET_MS
        self._target_us = None if itl_target_ms is None else 1e3 * itl_target_ms
        self._patience_us = float("inf") if ttft_target_ms is None else 1e3 * ttft_target_ms
        self._token_budget = token_budget
        self._times = times
        self._rows = [rows for rows, _ in times.decode]
        self._decode = [us for _, us in times.decode]
        self._beside = [us for _, us in times.beside]
        self._lane_tokens = [tokens for tokens, _ in times.lane]
        self._lane = [us for _, us in times.lane]
        self._mixed: dict[int, list[tuple[int, int]]] = {}
        for rows, tokens, us in times.mixed:
            sizes = self._mixed.setdefault(rows, [])
            if not sizes or sizes[-1][0] < token_budget:
                sizes.append((min(tokens, token_budget), us))
        self._mixed_rows = sorted(self._mixed)
        self._corrections: dict[Way | None, float] = {None: 1.0, Way.MIXED: 1.0}

    def choose(self, load: Load) -> Choice:
        if not load.rows:
            return Choice(min(MOST_PRIMARY_TOKENS, self._token_budget), Way.ALONE)
        target = MARGIN * self.target(load)
        chunk, ways = self._best_chunk(load, target), []
        if chunk is not None:
            ways.append((self._mixed_us(load, chunk), Choice(chunk, Way.MIXED)))
        if self.beside(load) <= target:
            ways.append((self._lane_us(load), Choice(self._token_budget, Way.LANE)))
        us, choice = min(ways or [self._gentlest(load)], key=lambda way: way[0])
        return choice if us <= self._patience_us else self._patient(load, choice, us)

    def _gentlest(self, load: Load) -> tuple[float, Choice]:
        """The way with the shortest decode step."""
        smallest = self._sizes(load.rows)[0][0]
        if self.beside(load) < self.mixed(load, smallest):
            return self._lane_us(load), Choice(self._token_budget, Way.LANE)
        return self._mixed_us(load, smallest), Choice(smallest, Way.MIXED)

    def _patient(self, load: Load, choice: Choice, us: float) -> Choice:
        """The smallest chunk with which nobody waits too long, or else the one that works the backlog off fastest."""
        for tokens, _ in self._sizes(load.rows):
            took = self._mixed_us(load, tokens)
            if took < us:
                choice, us = Choice(tokens, Way.MIXED), took
            if us <= self._patience_us or tokens >= load.remaining:
                break
        return choice

    def target(self, load: Load) -> float:
        """What a decode step may take."""
        return self._target_us if self._target_us is not None else TARGET_FACTOR * self.decode(load)

    def _best_chunk(self, load: Load, target: float) -> int | None:
        """The largest chunk that keeps the target; no larger than what completes all prompts.

        A larger chunk may take less time than a smaller one (matrix products come in tiles), so all are looked at.
        """
        best = None
        for tokens, _ in self._sizes(load.rows):
            if self.mixed(load, tokens) <= target:
                best = tokens
            if tokens >= load.remaining:
                break
        return best

    def _mixed_us(self, load: Load, tokens: int) -> float:
        """Until the prompt is computed, in chunks of that size."""
        steps = -(-load.remaining // tokens)
        middle = Load(load.rows, load.context, load.remaining, load.first, load.history + load.first // 2)
        return steps * self.mixed(middle, tokens)

    def _lane_us(self, load: Load) -> float:
        """Until the prompt is computed on the prefill lane, and joined by the decode step that runs then."""
        tokens = min(load.remaining, self._token_budget)
        batches = -(-load.remaining // tokens)
        history = self._times.history_ns * 1e-3 * load.history * load.remaining
        us = _at(self._lane_tokens, self._lane, tokens)
        return batches * (us + history) + self.beside(load)

    # -------------------------- predictions, in microseconds

    def decode(self, load: Load) -> float:
        """A step of decode rows alone."""
        return self._corrections[None] * (self._table(self._decode, load.rows) + self._reading(load))

    def beside(self, load: Load) -> float:
        """A decode step on its partition, beside a prefill."""
        reading = self._reading(load) * self._times.beside_slowdown
        return self._corrections[None] * (self._table(self._beside, load.rows) + reading)

    def mixed(self, load: Load, tokens: int) -> float:
        """A step of decode rows with a chunk of that size."""
        us = next(us for size, us in self._sizes(load.rows) if size >= tokens)
        history = self._times.history_ns * 1e-3 * load.history * tokens
        return self._corrections[Way.MIXED] * (us + self._reading(load) + history)

    def observe(self, observed: Observed, busy_us: int) -> None:
        """Move the correction of that kind of step. Prefill alone has no target to miss."""
        load, tokens = observed.load, observed.tokens
        if not load.rows or tokens > self._sizes(load.rows)[-1][0]:
            return
        way = Way.MIXED if tokens else None
        predicted = self.mixed(load, tokens) if tokens else self.decode(load)
        moved = self._corrections[way] * (1 + LEARNING * (busy_us / predicted - 1))
        self._corrections[way] = min(max(moved, CORRECTION[0]), CORRECTION[1])

    def _table(self, times: list[int], rows: int) -> float:
        return times[min(bisect_left(self._rows, rows), len(times) - 1)]

    def _reading(self, load: Load) -> float:
        return self._times.context_ns * 1e-3 * load.context

    def _sizes(self, rows: int) -> list[tuple[int, int]]:
        """(tokens, us) of the chunks that can stand beside so many decode rows."""
        return self._mixed[self._mixed_rows[min(bisect_left(self._mixed_rows, rows), len(self._mixed_rows) - 1)]]


def _at(sizes: list[int], times: list[int], size: int) -> float:
    """The time of a size, in proportion above the largest."""
    index = bisect_left(sizes, size)
    return times[index] if index < len(sizes) else times[-1] * size / sizes[-1]
