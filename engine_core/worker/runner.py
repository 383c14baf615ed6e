"""Executes plans: decode and mixed chunks on the primary lane, prefill batches on their own lane when the plan says so.

Owns launched work from the first enqueue to the reply, in the order of OWNERSHIP.md. Knows no transport and no CUDA:
all ordering goes through `Lanes`, all work through `Compute`; the same code drives every device.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from engine_core.device.base import Batch, Compute, Sampled
from engine_core.device.drop_queue import DropQueue
from engine_core.device.guard import LaunchGuard, Owned, Ownership, WorkFailed
from engine_core.device.lanes import Completion, Lanes, LaneStream
from engine_core.errors import ProtocolViolation
from engine_core.step import Lane, PrefillResult, RowStart, StepPlan, StepResult
from engine_core.worker.flights import PrefillFlight, StepFlight
from engine_core.worker.late_rows import LateRows
from engine_core.worker.logprob_blocks import split_logprobs
from engine_core.worker.pace import Pace
from engine_core.worker.step_log import NO_STEP_LOG, StepLog
from engine_core.worker.unconstrained import UNCONSTRAINED, Constraints, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.worker.inputs import RowTables


class Runner:
    """Plans in by `launch`, results out by `collect`, in plan order. Blocks only inside bounded driver calls."""

    def __init__(
        self,
        *,
        compute: Compute,
        lanes: Lanes,
        guard: LaunchGuard,
        drops: DropQueue,
        tables: RowTables,
        async_depth: int,
        partitions: Sequence[LaneStream] = (),
        now: Callable[[], float],
        step_log: StepLog = NO_STEP_LOG,
        constraints: Constraints = UNCONSTRAINED,
    ) -> None:
        self._compute = compute
        self._lanes = lanes
        self._guard = guard
        self._drops = drops
        self._tables = tables
        self._rings = async_depth + 1
        self._partitions = partitions
        self._now = now
        self._step_log = step_log
        self._constraints = constraints
        self._late = LateRows(constraints)
        self._pace = Pace()
        self._steps: deque[StepFlight] = deque()
        self._prefill: PrefillFlight | None = None
        self._prefills = 0
        self._expected = 1
        self._last_result = now()

    # ------------------------------------------------------------------ launch

    def launch_in(self) -> float:
        """Seconds until a plan that has arrived is best launched (`pace.py`)."""
        if self._prefill is None or not self._steps or self._steps[-1].completion is None:
            return 0.0
        return max(0.0, self._pace.due(self._last_result, len(self._steps)) - self._now())

    def launch(self, plan: StepPlan) -> None:
        """Enqueue one plan. A recoverable failure becomes part of the step's result; all else ends the worker."""
        started = self._now()
        self._admit(plan)
        self._stop_waiting()
        appended = self._tables.apply(plan)
        for start in plan.starts:
            self._constraints.start(start.slot, start.grammar, self._tables.output(start))
        drawing = self._late.sort(plan, self._tables.decode_slots(plan))
        on_lane = plan.prefill_lane and bool(plan.chunks)
        mixed, late = ([], []) if on_lane else (plan.chunks, drawing.late_chunks)
        batch = self._tables.batch(plan.step, Lane.PRIMARY, drawing.decode, mixed, late)
        flight = StepFlight(plan.step, Owned(f"step {plan.step}"), plan.step % self._rings, batch, started)
        flight.late, flight.late_chunks = drawing.late, late
        flight.prompts = not on_lane and bool(plan.starts or plan.chunks)
        self._steps.append(flight)
        self._lanes.launching(Lane.PRIMARY)
        if plan.starts:
            self._compute.end_rows([start.slot for start in plan.starts])
        self._start_rows([] if on_lane else plan.starts, batch)
        self._compute.append_pages(*appended)
        self._join_if_complete(self._carrier(flight))
        prefill = self._open_prefill(plan, drawing.late_chunks) if on_lane else None
        if plan.decode_slots or plan.chunks or flight.joined or self._prefill is None:
            self._launch_primary(flight)
        if prefill is not None:
            self._launch_prefill(prefill, plan.starts)
        self._step_log.launched(plan, batch.decode_rows, started)

    def _admit(self, plan: StepPlan) -> None:
        if plan.step != self._expected:
            raise ProtocolViolation(f"plan {plan.step} arrived where {self._expected} was due")
        if len(self._steps) >= self._rings:
            raise ProtocolViolation(f"plan {plan.step} exceeds the {self._rings - 1} that may be in flight")
        self._expected += 1

    def _stop_waiting(self) -> None:
        """An empty plan waits for the prefill in flight until another plan follows; then it is answered without it.

        So results never queue behind a prefill, and the primary lane is given its steps in order.
        """
        if self._steps and self._steps[-1].owned.state is Ownership.NONE:
            self._launch_primary(self._steps[-1])

    def _start_rows(self, starts: Sequence[RowStart], batch: Batch) -> None:
        for start in starts:
            self._compute.start_row(start, batch)

    def _launch_primary(self, flight: StepFlight) -> None:
        """Enqueue the step's own rows and record its completion; the guard is armed throughout (rules O1, O4, O5)."""
        flight.owned.to(Ownership.LAUNCHING)
        flight.batch.partition = None if self._prefill is None else self._prefill.batch.partition
        try:
            with self._guard.armed(flight.owned):
                self._lanes.launching(Lane.PRIMARY, flight.step)
                if len(flight.batch.slots):
                    flight.refused = self._mask(flight.batch)
                    flight.span = self._step_log.begin(Lane.PRIMARY)
                    self._compute.forward(flight.batch, flight.ring)
                    self._compute.sample(flight.batch, flight.ring)
                    self._step_log.finish(flight.span)
                flight.owned.to(Ownership.LAUNCHED)
                completion = self._lanes.complete(Lane.PRIMARY, flight.step)
                flight.completion = completion
                flight.owned.to(Ownership.WORKER_OWNED)
        except WorkFailed as failure:
            flight.error = str(failure)

    def _mask(self, batch: Batch) -> list[Refused]:
        """Give the batch its masks; (slot, cause) of the rows that can't draw (they draw anything)."""
        batch.masks, refused = self._constraints.masks(batch.slots[batch.sample_rows])
        return refused

    def _read(self, batch: Batch, ring: int) -> Sampled:
        """A proven batch's results; the rows' next masks begin."""
        sampled = self._compute.read(batch, ring)
        self._constraints.drawn(batch.slots[batch.sample_rows], sampled.tokens)
        return sampled

    # ----------------------------------------------------------------- prefill lane

    def _open_prefill(self, plan: StepPlan, late: list[int]) -> PrefillFlight:
        """The plan's batch, beside which decode keeps to its partition from now on (rule L2).

        At most one is in flight (rule L6), and it is until its result is read: so its ring slot's next batch comes
        behind its draw.
        """
        step = plan.step
        unread = [prefill.step for flight in self._steps for prefill in flight.joined]
        if self._prefill is not None:
            unread.append(self._prefill.step)
        if unread:
            raise ProtocolViolation(f"step {step} launches a prefill while that of step {unread[0]} is in flight")
        if not self._lanes.has(Lane.PREFILL):
            raise ProtocolViolation(f"step {step} asks for a prefill lane; this worker has none")
        if not 0 <= plan.partition < max(1, len(self._partitions)):
            raise ProtocolViolation(f"step {step} asks for partition {plan.partition} of {len(self._partitions)}")
        batch = self._tables.batch(step, Lane.PREFILL, self._tables.no_slots, plan.chunks, late)
        flight = PrefillFlight(step, Owned(f"the prefill of step {step}"), self._prefills % self._rings, batch)
        flight.late = late
        self._prefills += 1
        self._prefill = flight
        batch.partition = plan.partition
        if self._partitions:
            self._lanes.steer(Lane.PREFILL, self._partitions[plan.partition])
        return flight

    def _launch_prefill(self, flight: PrefillFlight, starts: Sequence[RowStart]) -> None:
        """Enqueue the batch, after this step's decode: its host work delays nobody (rule L5).

        The rows that start with it do so on its own lane, ahead of it: it waits for no decode step (rule O1).
        """
        flight.owned.to(Ownership.LAUNCHING)
        try:
            with self._guard.armed(flight.owned):
                self._lanes.launching(Lane.PREFILL, flight.step)
                for producer in self._producers():
                    self._lanes.order_after(Lane.PREFILL, producer)
                flight.launched = self._now()
                self._start_rows(starts, flight.batch)
                flight.span = self._step_log.begin(Lane.PREFILL)
                self._compute.forward(flight.batch, flight.ring)
                self._step_log.finish(flight.span)
                flight.owned.to(Ownership.LAUNCHED)
                flight.completion = self._lanes.complete(Lane.PREFILL, flight.step)
                flight.owned.to(Ownership.WORKER_OWNED)
            self._pace.restart()
            self._step_log.prefill_launched(flight.batch)
        except WorkFailed as failure:
            flight.error = str(failure)

    def _producers(self) -> list[Completion]:
        """Of the primary lane's steps in flight those that a batch may build on: chunks before its own, tables.

        Whatever else it touches was proven done before it was given away (rules O8, O12). A step without a completion
        has failed, behind a synchronization of every lane (rule O1).
        """
        return [step.completion for step in self._steps if step.prompts and step.completion is not None]

    def _carrier(self, flight: StepFlight) -> StepFlight:
        """Whose result a batch that joins now travels with: the step's before this one, as long as that is in flight.

        The batch draws behind it and ahead of this step, so its first tokens needn't wait for this one.
        """
        before = self._steps[-2] if len(self._steps) > 1 else None
        if before is None or before.completion is None or self._prefill is None or before.step <= self._prefill.step:
            return flight
        return before

    def _join_if_complete(self, flight: StepFlight) -> bool:
        """Take a prefill that is proven complete (or failed) into this step's result (rule O8).

        Its last chunks sample now, on the primary lane. A step that was launched before is complete behind them.
        """
        prefill = self._prefill
        if prefill is None or (prefill.completion is not None and not self._lanes.done(prefill.completion)):
            return False
        self._prefill = None
        flight.joined.append(prefill)
        if prefill.launched is not None:
            prefill.busy_us = round((self._now() - prefill.launched) * 1e6)
        self._step_log.completed(prefill.batch, prefill.span)
        if prefill.completion is not None:
            prefill.owned.to(Ownership.COMPLETE)
            try:
                with self._guard.armed(prefill.owned):
                    self._lanes.launching(Lane.PRIMARY)
                    self._lanes.order_after(Lane.PRIMARY, prefill.completion)
                    prefill.refused = self._mask(prefill.batch)
                    prefill.drawing = self._step_log.begin(Lane.PRIMARY)
                    self._compute.sample(prefill.batch, prefill.ring)
                    self._step_log.finish(prefill.drawing)
                    if flight.completion is not None:
                        behind = self._lanes.complete(Lane.PRIMARY, flight.step)
                        flight.superseded.append(flight.completion)
                        flight.completion = behind
            except WorkFailed as failure:
                prefill.error = str(failure)
            self._lanes.discard(prefill.completion)
        self._drops.release(Lane.PREFILL, self._lanes.proven(Lane.PREFILL))
        return True

    # ---------------------------------------------------------------- collect

    def collect(self) -> list[StepResult]:
        """Results of the steps proven complete, oldest first; only queries (rule E7)."""
        results: list[StepResult] = []
        while self._steps and self._head_complete():
            results.append(self._result(self._steps.popleft()))
        return results

    def awaited(self) -> Completion | None:
        """The completion without which no result can come out, or None when there is nothing to wait for."""
        if not self._steps:
            return None
        head = self._steps[0]
        if head.owned.state is Ownership.NONE:
            return self._prefill.completion if self._prefill is not None else None
        return head.completion

    def _head_complete(self) -> bool:
        head = self._steps[0]
        if head.owned.state is Ownership.NONE:
            if not self._join_if_complete(head):
                return False
            self._launch_primary(head)
        return head.completion is None or self._lanes.done(head.completion)

    def _result(self, flight: StepFlight) -> StepResult:
        """Read a proven step's results. Reading may fail like any other work: then the step failed."""
        sampled: Sampled | None = None
        if flight.error is None:
            flight.owned.to(Ownership.COMPLETE)
            try:
                with self._guard.armed(flight.owned):
                    sampled = self._read(flight.batch, flight.ring) if len(flight.batch.slots) else None
            except WorkFailed as failure:
                flight.error = str(failure)
        self._step_log.completed(flight.batch, flight.span)
        for prefill in flight.joined:
            self._step_log.joined(flight.step, prefill.batch, prefill.drawing)
        prefills = [self._prefill_result(prefill) for prefill in flight.joined]
        for completion in (*flight.superseded, flight.completion):
            if completion is not None:
                self._lanes.discard(completion)
        self._drops.release(Lane.PRIMARY, self._lanes.proven(Lane.PRIMARY))
        flight.owned.to(Ownership.REPLIED)
        decode = flight.batch.decode_rows
        tokens, logprobs = b"", None
        if sampled is not None:
            tokens = sampled.tokens[:decode].tobytes()
            logprobs, chunk_logprobs = split_logprobs(sampled.logprobs, decode)
            if len(flight.batch.slots) > decode:
                drawn = sampled.tokens[decode:].tobytes()
                described = sampled.prompt_logprobs
                prefills.append(PrefillResult(flight.step, drawn, chunk_logprobs, described, late=flight.late_chunks))
        late = flight.late if flight.error is None else []
        self._late.told(sum((prefill.late for prefill in prefills), late))
        return StepResult(
            step=flight.step,
            tokens=tokens,
            logprobs=logprobs,
            prefills=prefills,
            primary_complete=flight.step,
            prefill_complete=self._lanes.proven(Lane.PREFILL),
            error=flight.error,
            busy_us=self._busy_us(flight),
            refused=sum((prefill.refused for prefill in flight.joined), flight.refused),
            late=late,
        )

    def _busy_us(self, flight: StepFlight) -> int:
        """From its launch, or the result before it, to now that its completion was found; what it was beside a prefill
        is the pace of the next."""
        before, self._last_result = self._last_result, self._now()
        if flight.batch.partition is not None and flight.started <= before:
            self._pace.took(self._last_result - before)
        return round((self._last_result - max(flight.started, before)) * 1e6)

    def _prefill_result(self, flight: PrefillFlight) -> PrefillResult:
        sampled: Sampled | None = None
        if flight.error is None:
            try:
                with self._guard.armed(flight.owned):
                    sampled = self._read(flight.batch, flight.ring)
            except WorkFailed as failure:
                flight.error = str(failure)
        flight.owned.to(Ownership.REPLIED)
        if sampled is None:
            return PrefillResult(flight.step, b"", error=flight.error, busy_us=flight.busy_us)
        return PrefillResult(
            *(flight.step, sampled.tokens.tobytes(), sampled.logprobs, sampled.prompt_logprobs),
            busy_us=flight.busy_us,
            late=flight.late,
        )

    def caught_up(self) -> list[int]:
        """Slots of rows that results named as late, and that may be planned again."""
        return self._late.caught_up(self._now())

    def late_until(self) -> float | None:
        """When the first of the others must be planned again, to be refused."""
        return self._late.next_deadline(self._now())

    def pending(self) -> list[Completion]:
        """Completions that must come within the bound (rule E6): of the oldest step, and of the prefill in flight."""
        oldest = self._steps[0].completion if self._steps else None
        prefill = None if self._prefill is None else self._prefill.completion
        return [completion for completion in (oldest, prefill) if completion is not None]

    # ------------------------------------------------------------ quiesce, close

    def quiesce(self) -> None:
        """Prove every lane idle, or abort (rule O7). Results stay to be collected."""
        self._guard.quiesce("quiesce")

    def close(self) -> None:
        """Prove every lane idle, or abort; only then free (rule O13)."""
        self._guard.quiesce("teardown")
        self._step_log.close()
        self._compute.close()
