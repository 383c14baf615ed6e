"""Work that was submitted and whose result isn't applied: what each plan asked for, and whether the answer fits.

Owns the match of results to plans and the ownership states of a prefill batch as the core sees them (OWNERSHIP rules
O7, O8). A result that doesn't fit raises `ResultMismatch` before anything of it is applied.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine_core.errors import EngineDead
from engine_core.scheduling.rows import RowGroup
from engine_core.scheduling.step_model import Load, Observed, Work
from engine_core.step import LogprobBlock, PrefillResult, StepResult

if TYPE_CHECKING:
    from engine_core.scheduling.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """Positions start .. start + length - 1 of a sequence's known ids."""

    sequence: Sequence
    slot: int
    start: int
    length: int
    last: bool
    """It ends the known ids: the sequence draws its next token after it."""

    @property
    def end(self) -> int:
        return self.start + self.length


class BatchState(enum.IntEnum):
    LAUNCHED = 0
    """Submitted; its step's result isn't back."""
    CORE_OWNED = 1
    """The worker has launched it; the core knows it by its step."""
    COMPLETE = 2
    """Proven complete by the worker."""
    APPLIED = 3


@dataclass(slots=True)
class PrefillBatch:
    """Chunks on the prefill lane. States follow one another without a gap; anything else is a bug and raises."""

    step: int
    chunks: list[Chunk]
    partition: int = 0
    """In force beside it."""
    state: BatchState = BatchState.LAUNCHED

    def advance(self, state: BatchState) -> None:
        if state != self.state + 1:
            raise RuntimeError(f"the prefill batch of step {self.step}: {self.state.name} → {state.name}")
        self.state = state


@dataclass(slots=True)
class Flight:
    """One submitted plan."""

    step: int
    rows: RowGroup
    """The decode rows, in plan order."""
    chunks: list[Chunk]
    """Those that share the step's forward."""
    batch: PrefillBatch | None = None
    """The one that this plan launches on the prefill lane."""
    load: Load | None = None
    """What the policy was asked about, where its time can teach the policy."""

    @property
    def timed(self) -> bool:
        """Its time says what such a step takes: the load is known, and it launched nothing beside itself."""
        return self.load is not None and self.batch is None and not self.empty

    @property
    def empty(self) -> bool:
        """A plan that only asks for the prefill in flight."""
        return self.rows.slots.size == 0 and not self.chunks and self.batch is None


class ResultMismatch(EngineDead):
    """A result was lost or doesn't answer its plan.

    `flight` and `batch` are the work whose tokens it should have held, where there is any.
    """

    def __init__(self, message: str, flight: Flight | None = None, batch: PrefillBatch | None = None) -> None:
        super().__init__(message)
        self.flight = flight
        self.batch = batch


class InFlight:
    """Submitted plans, oldest first, and the prefill batch that outlives its own plan."""

    def __init__(self) -> None:
        self._flights: deque[Flight] = deque()
        self.working = 0
        """Plans in flight that hold work of their own."""
        self.batch: PrefillBatch | None = None

    def __len__(self) -> int:
        return len(self._flights)

    def submit(self, flight: Flight) -> None:
        self._flights.append(flight)
        self.working += not flight.empty
        if flight.batch is not None:
            self.batch = flight.batch

    def observed(self, result: StepResult) -> list[Observed]:
        """What the result of the oldest plan says of the time that its work took; before the plan lands."""
        flight, seen = self._flights[0] if self._flights else None, []
        if flight is not None and flight.timed and result.error is None and not result.late:
            assert flight.load is not None
            tokens = sum(chunk.length for chunk in flight.chunks)
            beside = self.batch if self.batch is not None and self.batch.step < flight.step else None
            work = Work.BESIDE if beside is not None else Work.MIXED if tokens else Work.DECODE
            partition = beside.partition if beside is not None else 0
            seen.append(Observed(work, flight.load, tokens, result.busy_us, partition))
        for prefill in result.prefills:
            if self.batch is not None and prefill.step == self.batch.step and prefill.error is None:
                seen.append(_observed_batch(self.batch, prefill.busy_us))
        return seen

    def land(self, result: StepResult) -> Flight:
        """The plan that a result answers, after all its counts were checked. Raises ResultMismatch."""
        if not self._flights:
            raise ResultMismatch(f"a result for step {result.step} arrived and no step is in flight")
        flight = self._flights[0]
        problem = self._problem(flight, result)
        if problem is not None:
            raise ResultMismatch(
                f"step {flight.step}: its result was lost or doesn't match its plan: {problem}",
                flight,
                self.batch if result.prefills or flight.empty else None,
            )
        self._flights.popleft()
        self.working -= not flight.empty
        return flight

    def _problem(self, flight: Flight, result: StepResult) -> str | None:
        if result.step != flight.step:
            return f"the worker answered step {result.step}"
        if result.primary_complete < result.step:
            return f"its proof covers the primary lane up to step {result.primary_complete} only"
        expected = 0 if result.error is not None else flight.rows.slots.size - len(result.late)
        if not set(result.late) <= set(flight.rows.slots.tolist()):
            return f"late rows in slots {result.late} weren't planned"
        if len(result.tokens) != 4 * expected:
            return f"{len(result.tokens)} bytes of tokens answer {expected} rows"
        problem = _logprob_problem(result.logprobs, expected)
        if problem is None:
            problem = self._batch_problem(result) if not flight.chunks else _chunks_problem(flight, result)
        return problem

    def _batch_problem(self, result: StepResult) -> str | None:
        """A step without chunks of its own may report the batch of the prefill lane."""
        if not result.prefills:
            return self._silence_problem()
        if len(result.prefills) > 1 or self.batch is None or result.prefills[0].step != self.batch.step:
            steps = [prefill.step for prefill in result.prefills]
            in_flight = "none" if self.batch is None else f"that of step {self.batch.step}"
            return f"prefills of steps {steps} were reported; in flight is {in_flight}"
        if self.batch.step > result.step:
            return f"the prefill of step {self.batch.step} was reported before its step was answered"
        return _prefill_problem(result.prefills[0], self.batch.chunks)

    def _silence_problem(self) -> str | None:
        """A plan that asks for the batch is answered without it only when another plan has followed."""
        if self.batch is not None and len(self._flights) == 1 and self._flights[0].empty:
            return f"it was asked for the prefill of step {self.batch.step}, which isn't in it"
        return None


def _observed_batch(batch: PrefillBatch, busy_us: int) -> Observed:
    tokens = sum(chunk.length for chunk in batch.chunks)
    history = sum(chunk.length * chunk.start for chunk in batch.chunks) // tokens
    return Observed(Work.BATCH, Load(0, 0, tokens, tokens, history), tokens, busy_us, batch.partition)


def _chunks_problem(flight: Flight, result: StepResult) -> str | None:
    """A step whose chunks shared its forward reports exactly these."""
    if result.error is not None:
        return "a failed step reported prefills" if result.prefills else None
    if [prefill.step for prefill in result.prefills] != [flight.step]:
        return f"prefills of steps {[p.step for p in result.prefills]} were reported instead of its own"
    return _prefill_problem(result.prefills[0], flight.chunks)


def _prefill_problem(prefill: PrefillResult, chunks: list[Chunk]) -> str | None:
    lasts = [chunk.slot for chunk in chunks if chunk.last]
    expected = 0 if prefill.error is not None else len(lasts) - len(prefill.late)
    if not set(prefill.late) <= set(lasts):
        return f"late rows in slots {prefill.late} weren't to draw"
    if len(prefill.tokens) != 4 * expected:
        return f"{len(prefill.tokens)} bytes of tokens answer {expected} finished prompts"
    slots = [chunk.slot for chunk in chunks]
    for block in prefill.prompt_logprobs:
        count = len(block.logprobs) // 4
        sizes = (len(block.logprobs), len(block.ranks), len(block.top_ids), len(block.top_logprobs))
        if sizes != (4 * count, 4 * count, 4 * count * block.top, 4 * count * block.top):
            return f"ragged prompt logprobs for slot {block.slot}"
        if block.slot not in slots:
            return f"prompt logprobs for slot {block.slot}, which isn't among the chunks'"
    return _logprob_problem(prefill.logprobs, expected)


def _logprob_problem(block: LogprobBlock | None, rows: int) -> str | None:
    if block is None:
        return None
    count = len(block.rows) // 4
    if {len(block.rows), len(block.sampled), len(block.ranks), len(block.counts)} != {4 * count}:
        return "ragged logprob columns"
    alternatives = int(np.frombuffer(block.counts, "<u4").sum(dtype=np.int64))
    if {len(block.top_ids), len(block.top_logprobs)} != {4 * alternatives}:
        return f"{len(block.top_ids)} bytes of alternatives where {alternatives} were counted"
    if count and int(np.frombuffer(block.rows, "<u4").max()) >= rows:
        return f"logprobs of a row beyond the {rows} sampled"
    return None
