"""The core's end of a simulation: an Executor over the frames of one or several ranks.

With several, a step is answered when every rank has answered it, and a prefill is complete when every rank has said so
(rule L7); each rank may say so with a step of its own. A rank's death is known at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from engine_core.errors import EngineDead
from engine_core.executor.channel import CaughtUp, Forget, Plan, Prepare, Prepared, Quiesced, Result
from engine_core.executor.channel import Quiesce as QuiesceFrame
from engine_core.request import Grammar
from engine_core.step import GrammarPrepared, PrefillResult, StepPlan, StepResult
from tests.sim.rank import Rank


class SimExecutor:
    """`tamper` changes merged results on their way in: for lost and mismatched ones."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._results: list[deque[StepResult]] = [deque() for _ in ranks]
        self._reported: dict[int, list[PrefillResult]] = {}
        self._quiesced = [0] * len(ranks)
        self._token = 0
        self._prepared: list[GrammarPrepared] = []
        self._caught_up: list[int] = []
        self.plans: list[StepPlan] = []
        self.lane_steps: set[int] = set()
        """Steps that launched a prefill on its own lane."""
        self.tamper: Callable[[StepResult], StepResult] | None = None

    @property
    def death(self) -> str | None:
        return next((rank.abort_cause for rank in self._ranks if rank.dead), None)

    def submit(self, plan: StepPlan) -> None:
        self._check_alive()
        self.plans.append(plan)
        if plan.prefill_lane:
            self.lane_steps.add(plan.step)
        for rank in self._ranks:
            rank.core_channel.send(Plan(plan))

    def collect(self) -> list[StepResult]:
        for index, rank in enumerate(self._ranks):
            while (body := rank.core_channel.receive()) is not None:
                match body:
                    case Quiesced():
                        self._quiesced[index] = body.token
                    case Prepared():
                        self._prepared.append(body.outcome)
                    case CaughtUp():
                        self._caught_up += body.slots
                    case _:
                        assert isinstance(body, Result)
                        self._results[index].append(body.result)
        merged: list[StepResult] = []
        while all(self._results):
            result = self._merge([results.popleft() for results in self._results])
            merged.append(result if self.tamper is None else self.tamper(result))
        if not merged:
            self._check_alive()
        return merged

    def _merge(self, parts: list[StepResult]) -> StepResult:
        first = parts[0]
        error = next((part.error for part in parts if part.error is not None), None)
        complete = [merged for part in parts for prefill in part.prefills if (merged := self._report(prefill))]
        if error is not None:
            complete = [prefill for prefill in complete if prefill.step != first.step]
        return StepResult(
            step=first.step,
            tokens=first.tokens if error is None else b"",
            logprobs=first.logprobs if error is None else None,
            prefills=complete,
            primary_complete=min(part.primary_complete for part in parts),
            prefill_complete=min(part.prefill_complete for part in parts),
            error=error,
            late=first.late if error is None else [],
        )

    def _report(self, prefill: PrefillResult) -> PrefillResult | None:
        """The prefill's result once every rank has reported it; a rank's error is everybody's."""
        reports = self._reported.setdefault(prefill.step, [])
        reports.append(prefill)
        if len(reports) < len(self._ranks):
            return None
        del self._reported[prefill.step]
        return next((report for report in reports if report.error is not None), reports[0])

    def prepare(self, key: int, grammar: Grammar) -> None:
        (rank,) = self._ranks  # several would have to agree on who is late
        rank.core_channel.send(Prepare(key, grammar.kind, grammar.text))

    def prepared(self) -> list[GrammarPrepared]:
        prepared, self._prepared = self._prepared, []
        return prepared

    def caught_up(self) -> list[int]:
        slots, self._caught_up = self._caught_up, []
        return slots

    def forget(self, key: int) -> None:
        (rank,) = self._ranks
        rank.core_channel.send(Forget(key))

    def quiesce(self) -> None:
        self._token += 1
        for rank in self._ranks:
            rank.core_channel.send(QuiesceFrame(self._token))

    @property
    def quiesced(self) -> bool:
        return all(token == self._token for token in self._quiesced)

    def _check_alive(self) -> None:
        if self.death is not None:
            raise EngineDead(f"worker 0 aborted: {self.death}")
