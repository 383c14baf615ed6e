"""How many prompt tokens a step computes, and on which lane: pure functions of the load and of measured step times.

Owns the choice that `--decode-overlap` names. `off`, `stream` and `green` are fixed; `auto` asks `StepTimes` what each
way would take. Of those with which decode rows keep their target, and that finish the prompts nearly as soon as any of
them, it picks the one with which everybody together waits least:

* no decode rows: the whole GPU, in chunks that soon let the first rows decode;
* a chunk in the decode rows' own forward, of the largest size whose step stays within the target;
* a batch on the prefill lane, with each partition on which decode stays within the target.

Where nothing stays within the target, or prompts pile up so that the last would wait longer than the target of the time
to first token, ways are looked at with which it doesn't: the one with the shortest decode step is taken, or, of a pile,
again that with which all wait least; without any, the fastest. So prompts always get on, and under such a load a decode
step costs more, but everybody's answer is sooner complete.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from engine_core.scheduling.step_model import Load, Observed, StepModel
from engine_core.step import MOST_PRIMARY_TOKENS, StepTimes

TARGET_FACTOR, TYPICAL_CONTEXT = 2.0, 512
"""Without `--itl-target-ms`: a decode step may take so many times as long as it would alone with rows of so many tokens
…"""
LEAST_FACTOR = 1.25
"""… or, where contexts are long, so many times as long as it would alone with its own."""
LEAST_ROWS = 16
"""Fewer decode rows are held to the pace of so many: a step of theirs takes little less, and prompts three times as
long if it may not take much more."""
LANE_TOKENS = 2048
"""Of a batch on the prefill lane, unless its first prompt has more: further ones would keep that one waiting for its
first token, and batches of more tokens don't get through more of them in the same time."""
TTFT_TARGET_MS = 400.0
"""Without `--ttft-target-ms` and `--itl-target-ms`: how long prompts may take, all that wait together."""
MARGIN = 0.96
"""Of a target, for what the model doesn't know: the longest steps beside a prefill take longer than the median."""
NEAR, NEAR_US = 1.05, 12000.0
"""Of ways that take up to so many times as long as the fastest, or so much longer, what all wait together decides."""
PROMPT_WEIGHT = 2.0
"""A prompt's wait for its first token counts so many times as much as a decode row's for its next ones."""
DELIVERY_US = 150.0
"""Clients see so much more of the longest steps than of the median: what it takes to bring tokens to them varies."""


class Way(Enum):
    """Where a step's chunks are computed."""

    ALONE = "alone"
    """No decode row waits: the whole GPU."""
    MIXED = "mixed"
    """In the decode rows' own forward."""
    LANE = "lane"
    """On the prefill lane, beside decode."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Up to `tokens` prompt tokens, computed that way."""

    tokens: int
    way: Way
    partition: int = 0
    """In force beside a batch on the lane."""


@dataclass(frozen=True, slots=True)
class _Prospect:
    """What comes of a choice."""

    us: float
    """Until the prompts that wait are computed."""
    step_us: float
    """Of a decode step meanwhile, on the lane of the last."""
    choice: Choice


class PrefillPolicy(Protocol):
    def choose(self, load: Load) -> Choice:
        """For the step that is being planned."""

    def observe(self, observed: Observed) -> None:
        """What work took that was run."""


class FixedPolicy:
    """The same for every load: mixed in one forward, or, with `lane`, beside decode."""

    def __init__(self, token_budget: int, *, lane: bool) -> None:
        self._token_budget = token_budget
        self._lane = lane

    def choose(self, load: Load) -> Choice:
        if not load.rows:
            return Choice(self._token_budget, Way.ALONE)
        return Choice(self._token_budget, Way.LANE) if self._lane else Choice(self._token_budget - load.rows, Way.MIXED)

    def observe(self, observed: Observed) -> None:
        """Nothing depends on it."""


class AutoPolicy:
    """`auto`: see the module."""

    def __init__(
        self, token_budget: int, times: StepTimes, itl_target_ms: float | None, ttft_target_ms: float | None
    ) -> None:
        """An ITL target alone is kept whatever waits; without any, decode's lone pace and TTFT_TARGET_MS are."""
        self._lone_prompts_wait = ttft_target_ms is None
        """Beside decode on the lane, however long they take: nobody said how long that may be, and it has an end."""
        if ttft_target_ms is None and itl_target_ms is None:
            ttft_target_ms = TTFT_TARGET_MS
        self._target_us = None if itl_target_ms is None else 1e3 * itl_target_ms
        self._patience_us = float("inf") if ttft_target_ms is None else 1e3 * ttft_target_ms
        self._token_budget = token_budget
        self.model = StepModel(times, token_budget)

    def choose(self, load: Load) -> Choice:
        if not load.rows:
            return Choice(min(MOST_PRIMARY_TOKENS, self._token_budget), Way.ALONE)
        target = MARGIN * self.target(load) - DELIVERY_US
        lanes = [self._lane(load, partition) for partition in self.model.partitions]
        ways = self._kept_chunk(load, target) + [lane for lane in lanes if lane.step_us <= target]
        if ways and self._soon_enough(load, way := self._best(load, ways)):
            return way.choice
        pile = bool(ways) and load.remaining > load.first
        return self._patient(load, [*ways, *self._chunks(load), *lanes], pile=pile).choice

    def _soon_enough(self, load: Load, way: _Prospect) -> bool:
        alone_on_lane = way.choice.way is Way.LANE and load.remaining <= load.first
        return way.us <= self._patience_us or (alone_on_lane and self._lone_prompts_wait)

    def _best(self, load: Load, ways: list[_Prospect]) -> _Prospect:
        soonest = min(way.us for way in ways)
        near = max(NEAR * soonest, soonest + NEAR_US)
        return min((way for way in ways if way.us <= near), key=lambda way: self._waits(load, way))

    def _waits(self, load: Load, way: _Prospect) -> float:
        """What all wait together until the prompts are computed: decode rows for what is added to their steps, prompts
        for their first tokens, which come one after another."""
        added = load.rows * max(0.0, 1 - self.model.decode(load) / way.step_us)
        prompts = load.remaining / load.first
        return way.us * (added + PROMPT_WEIGHT * (prompts + 1) / 2)

    def target(self, load: Load) -> float:
        """What a decode step may take."""
        if self._target_us is not None:
            return self._target_us
        rows = max(load.rows, LEAST_ROWS)
        typical = self.model.decode(replace(load, rows=rows, context=TYPICAL_CONTEXT * rows))
        return max(TARGET_FACTOR * typical, LEAST_FACTOR * self.model.decode(load))

    def observe(self, observed: Observed) -> None:
        self.model.observe(observed)

    def _best_chunk(self, load: Load, target: float) -> int | None:
        """The largest chunk that keeps the target; no larger than what completes all prompts.

        A larger chunk may take less time than a smaller one (matrix products come in tiles), so all are looked at.
        """
        best = None
        for tokens in self.model.sizes(load.rows):
            if self.model.mixed(load, tokens) <= target:
                best = tokens
            if tokens >= load.remaining:
                break
        return best

    def _kept_chunk(self, load: Load, target: float) -> list[_Prospect]:
        """The largest chunk that keeps the target, if any does."""
        chunk = self._best_chunk(load, target)
        if chunk is None:
            return []
        us = self._kept_us(load, chunk, target)
        return [_Prospect(us, self.model.mixed(load, chunk), Choice(chunk, Way.MIXED))]

    def _kept_us(self, load: Load, chunk: int, target: float) -> float:
        """Until the prompts are computed in the chunks that keep the target: they shrink as the history grows.

        The first waits for the decode step in flight.
        """
        us = 0.0
        for share in (0.25, 0.75):
            there = replace(load, history=load.history + round(share * load.first))
            tokens = self._best_chunk(there, target) or self.model.sizes(load.rows)[0]
            us += load.remaining / 2 / tokens * self.model.mixed(there, tokens)
        return max(us, self.model.mixed(load, chunk)) + self.model.decode(load)

    def _patient(self, load: Load, ways: list[_Prospect], *, pile: bool) -> _Prospect:
        """Of the ways with which nobody waits too long the gentlest to decode, with a pile that with which all wait
        least; or else the fastest."""
        patient = [way for way in ways if self._soon_enough(load, way)]
        if not patient:
            return min(ways, key=lambda way: way.us)
        return min(patient, key=lambda way: self._waits(load, way) if pile else way.step_us)

    def _chunks(self, load: Load) -> list[_Prospect]:
        """Every size that is no larger than what completes all prompts, whatever it makes of a decode step."""
        ways = []
        for tokens in self.model.sizes(load.rows):
            ways.append(
                _Prospect(self._mixed_us(load, tokens), self.model.mixed(load, tokens), Choice(tokens, Way.MIXED))
            )
            if tokens >= load.remaining:
                break
        return ways

    def _mixed_us(self, load: Load, tokens: int) -> float:
        """Until the prompts are computed, in chunks of that size."""
        steps = -(-load.remaining // tokens)
        return steps * self.model.mixed(replace(load, history=load.history + load.first // 2), tokens)

    def _lane(self, load: Load, partition: int) -> _Prospect:
        """Until the prompts are computed on the prefill lane and the last has joined the decode rows."""
        most = min(max(load.first, LANE_TOKENS), self._token_budget)
        tokens = min(load.remaining, most)
        beside, batches = self.model.beside(load, partition), -(-load.remaining // tokens)
        batch = self.model.batch(load, tokens, partition)
        # A complete batch waits for the decode step in flight; another follows it, and carries no further batch.
        us = batches * (batch + beside) + beside
        # Contexts grow by a token in every step, and the last step beside the batch shall keep the target, too.
        grown = replace(load, context=load.context + round(load.rows * batch / beside))
        return _Prospect(us, self.model.beside(grown, partition), Choice(most, Way.LANE, partition))
