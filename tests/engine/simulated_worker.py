"""A worker in memory whose tokens depend on the KV that it really finds in the pages it was told to use.

Every computed position stores a digest of the tokens up to it, read from the position before it through the row's page
table. A page that is shared too early, reused too early, or wrongly found in the prefix cache therefore changes tokens,
and the double also checks each plan for it directly. Work executes as late as the test likes, lane by lane.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np

from engine_core.errors import EngineDead
from engine_core.request import Grammar
from engine_core.step import (
    GrammarPrepared,
    LogprobBlock,
    PrefillChunk,
    PrefillResult,
    PromptLogprobBlock,
    RowStart,
    StepPlan,
    StepResult,
)
from tests.engine.simulated_model import digest, draw, history
from tests.engine.simulated_work import Batch, Pending, Row, Work

STEP_US, LANE_US = 650, 7_000
"""What every step, and every batch on the prefill lane, says it took."""


class BrokenPlan(AssertionError):
    """The plan would have damaged somebody's KV, or makes no sense."""


class SimulatedWorker:
    """An `Executor`. Nothing happens by itself: the test calls `finish_prefill` and `finish_step`, then `collect`."""

    def __init__(self, *, page_size: int, total_pages: int, max_num_seqs: int, overlap: bool = False) -> None:
        self.page_size = page_size
        self.kv = [[-1] * page_size for _ in range(total_pages)]
        self.rows: list[Row | None] = [None] * max_num_seqs
        self.plans: list[StepPlan] = []
        self.fail_steps: dict[int, str] = {}
        """Causes by step: its forward raises."""
        self.fail_prefills: dict[int, str] = {}
        """Causes by step: the batch that it launches on the prefill lane raises."""
        self.draws_suppressed = False
        """A worker that doesn't keep to `RowSampling.suppress`."""
        self.asked: dict[int, Grammar] = {}
        """Grammars that were asked for and not given back, by key."""
        self.grammar_outcomes: list[GrammarPrepared] = []
        self.refuse_slots: dict[int, str] = {}
        """Causes by slot: the grammar of its row allows nothing when the next step is reported."""
        self.late_draws: Iterator[bool] = itertools.repeat(False)
        """Whether each row that follows a grammar and is to draw is late, until `catch_up`."""
        self._caught_up: list[int] = []
        self.dead: str | None = None
        self.die_at_submit: str | None = None
        self._overlap = overlap
        self._pending: deque[Pending] = deque()
        self._batch: Batch | None = None
        self._results: list[StepResult] = []
        self._drawn: list[Row] = []
        """Rows whose token is in these."""
        self._proven_prefill = 0

    # -------------------------- Executor

    def submit(self, plan: StepPlan) -> None:
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.die_at_submit is not None:
            raise EngineDead(self.die_at_submit)
        if plan.step != len(self.plans) + 1:
            raise BrokenPlan(f"plan {plan.step} follows {len(self.plans)}")
        self.plans.append(plan)
        for start in plan.starts:
            self._start(start)
        for slot, page in zip(_ints(plan.page_slots), _ints(plan.page_ids), strict=True):
            self._row(slot).pages.append(page)
        slots = _ints(plan.decode_slots)
        late = [slot for slot in slots if self._comes_late(slot)]
        decode = [self._launch(slot, 1, decode=True, samples=True) for slot in slots if slot not in late]
        chunks = [self._launch_chunk(chunk) for chunk in plan.chunks]
        self._check_writes(decode + chunks)
        on_lane = plan.prefill_lane and bool(chunks)
        empty = not slots and not chunks
        self._pending.append(Pending(plan.step, decode, [] if on_lane else chunks, empty, late))
        if on_lane:
            if not self._overlap or self._batch is not None:
                raise BrokenPlan("a second prefill batch, or one without a lane (rule L6)")
            self._batch = Batch(plan.step, chunks)
        if empty and self._batch is None:
            raise BrokenPlan("an empty plan without a prefill in flight")

    def collect(self) -> list[StepResult]:
        if self.dead is not None:
            raise EngineDead(self.dead)
        results, self._results = self._results, []
        for row in self._drawn:
            row.unread = False
        self._drawn = []
        return results

    def prepare(self, key: int, grammar: Grammar) -> None:
        """The grammar's outcome is the test's to give, in `grammar_outcomes`."""
        self.asked[key] = grammar

    def prepared(self) -> list[GrammarPrepared]:
        outcomes, self.grammar_outcomes = self.grammar_outcomes, []
        return outcomes

    def caught_up(self) -> list[int]:
        slots, self._caught_up = self._caught_up, []
        return slots

    def forget(self, key: int) -> None:
        self.asked.pop(key)

    def quiesce(self) -> None:
        raise AssertionError("the engine doesn't quiesce by itself")

    @property
    def quiesced(self) -> bool:
        return True

    # -------------------------- driven by the test

    @property
    def busy(self) -> bool:
        return bool(self._pending) or self._batch is not None

    def finish_prefill(self) -> bool:
        """Execute the batch on the prefill lane; its result travels with the next step that finishes.

        It starts behind the steps with chunks that the primary lane was given before (rule O1).
        """
        batch = self._batch
        if batch is None or batch.executed or any(p.step < batch.step and p.chunks for p in self._pending):
            return False
        batch.error = self.fail_prefills.pop(batch.step, None)
        for work in batch.work:
            if batch.error is None:
                self._compute(work)
            else:
                self._spoil(work)
        batch.executed = True
        return True

    def finish_step(self) -> bool:
        """Execute the oldest plan and make its result, unless it is an empty one still waiting for the prefill."""
        if not self._pending:
            return False
        pending = self._pending[0]
        batch = self._batch
        if pending.empty and len(self._pending) == 1 and batch is not None and not batch.executed:
            return False
        self._pending.popleft()
        prefills = []
        if batch is not None and batch.executed and batch.step <= pending.step:
            prefills.append(
                msgspec.structs.replace(self._prefill_result(batch.step, batch.work), busy_us=LANE_US)
                if batch.error is None
                else PrefillResult(batch.step, b"", error=batch.error, busy_us=LANE_US)
            )
            self._proven_prefill, self._batch = batch.step, None
        error = self.fail_steps.pop(pending.step, None)
        if error is not None:
            for work in pending.decode + pending.chunks:
                self._spoil(work)
            self._results.append(
                StepResult(pending.step, b"", None, prefills, pending.step, self._proven_prefill, error, STEP_US)
            )
            return True
        for work in pending.decode + pending.chunks:
            self._compute(work)
        tokens = [self._sample(work.row) for work in pending.decode]
        logprobs = _logprobs([(work.row, token) for work, token in zip(pending.decode, tokens, strict=True)])
        if pending.chunks:
            prefills.append(self._prefill_result(pending.step, pending.chunks))
        self._results.append(
            StepResult(
                *(pending.step, _bytes(tokens), logprobs, prefills, pending.step, self._proven_prefill),
                busy_us=STEP_US,
                refused=list(self.refuse_slots.items()),
                late=pending.late,
            )
        )
        self.refuse_slots = {}
        return True

    def catch_up(self) -> None:
        """Late rows, which results have named by now, may be planned again."""
        for row in self.rows:
            if row is not None and row.late:
                row.late = False
                self._caught_up.append(row.slot)

    def hold(self, results: list[StepResult]) -> None:
        """Results as the test wants them, for the next `collect`."""
        self._results = results

    def finish_all(self) -> None:
        """Execute everything in flight."""
        while self.finish_prefill() or self.finish_step():
            pass

    # -------------------------- inside

    def _start(self, start: RowStart) -> None:
        ids = _ints(start.ids)
        row = Row(
            slot=start.slot,
            prompt_len=start.prompt_len,
            ids=ids,
            pages=_ints(start.pages),
            sampling=start.sampling,
            computed=start.cached,
            launched=start.cached,
            output=len(ids) - start.prompt_len,
            grammar=start.grammar,
        )
        if row.grammar and row.grammar not in self.asked:
            raise BrokenPlan(f"slot {start.slot} follows a grammar that isn't prepared")
        expected = 1
        for position in range(start.cached):
            expected = digest(expected, ids[position])
            if self._read(row, position) != expected:
                raise BrokenPlan(f"position {position} of slot {start.slot} isn't in its cached pages (rule O8)")
        self.rows[start.slot] = row

    def _launch_chunk(self, chunk: PrefillChunk) -> Work:
        row = self._row(chunk.slot)
        if chunk.start != row.launched or chunk.last != (chunk.start + chunk.length == len(row.ids)):
            raise BrokenPlan(f"chunk {chunk} of a row with {len(row.ids)} ids, {row.launched} launched")
        late = chunk.last and self._comes_late(chunk.slot)
        work = self._launch(chunk.slot, chunk.length, decode=False, samples=chunk.last and not late)
        work.late = late
        row.launched -= late
        return work

    def _comes_late(self, slot: int) -> bool:
        """Whether a row that is to draw is late."""
        row = self._row(slot)
        if row.late:
            raise BrokenPlan(f"slot {slot} is late, and was planned before it caught up")
        row.late = row.grammar != 0 and next(self.late_draws)
        return row.late

    def _launch(self, slot: int, length: int, *, decode: bool, samples: bool) -> Work:
        row = self._row(slot)
        work = Work(row, row.launched, row.launched + length, decode, samples)
        if work.end > len(row.pages) * self.page_size:
            raise BrokenPlan(f"slot {slot} is written beyond its pages")
        if row.grammar and decode and row.unread:
            raise BrokenPlan(f"slot {slot} follows a grammar, and its last token isn't back")
        row.unread = samples
        row.launched = work.end
        return work

    def _check_writes(self, works: list[Work]) -> None:
        """No page is written while it is in another row's table, or touched by unproven work of another row."""
        unproven = [w for pending in self._pending for w in pending.decode + pending.chunks]
        unproven += self._batch.work if self._batch is not None else []
        for work in works:
            written = set(work.row.pages[work.start // self.page_size : -(-work.end // self.page_size)])
            for other in unproven + works:
                if other.row is not work.row and written.intersection(self._touched(other)):
                    raise BrokenPlan(f"a page of slot {work.row.slot} is still touched by another row (rule O12)")

    def _touched(self, work: Work) -> list[int]:
        return work.row.pages[: -(-work.end // self.page_size)]

    def _row(self, slot: int) -> Row:
        row = self.rows[slot]
        if row is None:
            raise BrokenPlan(f"slot {slot} has no row")
        return row

    def _read(self, row: Row, position: int) -> int:
        return self.kv[row.pages[position // self.page_size]][position % self.page_size]

    def _compute(self, work: Work) -> None:
        row = work.row
        if row.computed != work.start:
            raise BrokenPlan(f"slot {row.slot}: position {work.start} follows {row.computed}")
        for position in range(work.start, work.end):
            token = row.last_token if work.decode else row.ids[position]
            previous = self._read(row, position - 1) if position else 1
            self.kv[row.pages[position // self.page_size]][position % self.page_size] = digest(previous, token)
        row.computed = work.end - work.late

    def _spoil(self, work: Work) -> None:
        """A forward that raised: lengths have advanced, and what is in the pages is anybody's guess."""
        for position in range(work.start, work.end):
            self.kv[work.row.pages[position // self.page_size]][position % self.page_size] = -7
        work.row.computed = work.end

    def _sample(self, row: Row) -> int:
        early = row.output < row.sampling.min_tokens and not self.draws_suppressed
        barred = tuple(_ints(row.sampling.suppress)) if early else ()
        row.last_token = draw(self._read(row, row.computed - 1), row.sampling.seed, barred)
        row.output += 1
        self._drawn.append(row)
        return row.last_token

    def _prefill_result(self, step: int, works: list[Work]) -> PrefillResult:
        lasts = [work for work in works if work.samples]
        tokens = [self._sample(work.row) for work in lasts]
        described = [block for work in works if (block := _describe(work)) is not None]
        logprobs = _logprobs([(work.row, token) for work, token in zip(lasts, tokens, strict=True)])
        late = [work.row.slot for work in works if work.late]
        return PrefillResult(step, _bytes(tokens), logprobs, described, late=late)


def prompt_logprob(tokens: list[int], index: int) -> float:
    """The double's logprob of prompt token `index`."""
    return -float(history(tokens[: index + 1]) % 1009)


def _describe(work: Work) -> PromptLogprobBlock | None:
    row, top = work.row, work.row.sampling.prompt_logprobs
    end = min(work.end + 1, row.prompt_len)
    if top < 0 or work.start + 1 >= end:
        return None
    values = [prompt_logprob(row.ids, index) for index in range(work.start + 1, end)]
    tops = [row.ids[index] for index in range(work.start + 1, end) for _ in range(top)]
    return PromptLogprobBlock(
        slot=row.slot,
        start=work.start + 1,
        logprobs=np.array(values, "<f4").tobytes(),
        ranks=np.arange(work.start + 1, end, dtype="<i4").tobytes(),
        top=top,
        top_ids=_bytes(tops),
        top_logprobs=np.array(tops, "<f4").tobytes(),
    )


def _logprobs(sampled: list[tuple[Row, int]]) -> LogprobBlock | None:
    """Alternatives of a token are the token and those after it; its logprob is its negative."""
    asked = [(i, row.sampling.logprobs, token) for i, (row, token) in enumerate(sampled) if row.sampling.logprobs >= 0]
    if not asked:
        return None
    tops = [token + k for _, count, token in asked for k in range(count)]
    return LogprobBlock(
        rows=np.array([i for i, _, _ in asked], "<u4").tobytes(),
        sampled=np.array([-token for _, _, token in asked], "<f4").tobytes(),
        ranks=np.array([token + 1 for _, _, token in asked], "<i4").tobytes(),
        counts=np.array([count for _, count, _ in asked], "<u4").tobytes(),
        top_ids=_bytes(tops),
        top_logprobs=np.array([-top for top in tops], "<f4").tobytes(),
    )


def _ints(data: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(data, "<i4")]


def _bytes(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()
