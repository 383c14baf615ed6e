"""Short schedules in which every kind of launched work is in flight at some moment, and what may come of them.

A scenario makes its moves and leaves the rest to `Sim.settle`; `check` says which of the allowed outcomes it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine_core.errors import StatusCode
from engine_core.request import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, Abort, Finish
from engine_core.scheduling.flight import BatchState
from engine_core.step import Lane, StepResult
from tests.sim.harness import NOW, SHUT_DOWN, Sim


@dataclass(frozen=True)
class Scenario:
    moves: Callable[[Sim], None]
    pages: int = 40
    ranks: int = 1
    loses_result: bool = False

    @property
    def name(self) -> str:
        return self.moves.__name__

    def build(self, mode: str, depth: int) -> Sim:
        return Sim(overlap=mode, depth=depth, pages=self.pages, ranks=self.ranks)

    def play(self, sim: Sim) -> Sim:
        self.moves(sim)
        sim.settle()
        return sim


def prefill_with_decode(sim: Sim) -> None:
    """A prompt of two batches arrives while another request decodes."""
    sim.add(1, list(range(6)), 7)
    sim.turn()
    sim.add(2, list(range(40, 66)), 2)
    for _ in range(2):
        sim.turn(prefill=0)


def goes_on_on_the_lane(sim: Sim) -> None:
    """A prompt's first chunk shares a step with another prompt; its last is a batch beside the decode that follows.

    At depth 2 and 3 the step is still in flight when the batch is launched.
    """
    sim.add(1, list(range(6)), 7)
    sim.add(2, list(range(40, 66)), 2)
    sim.step_engine()
    sim.step_worker()
    for _ in range(2):
        sim.turn(prefill=1)


def joins_in_flight(sim: Sim) -> None:
    """The prefill is complete while steps behind it are in flight: its result travels with the newest of them.

    At depth 1 there are none.
    """
    sim.add(1, list(range(6)), 12)
    sim.turn()
    sim.add(2, list(range(40, 52)), 2)
    sim.turn(prefill=0)
    sim.step_engine()
    sim.step_worker()
    sim.run_stream(Lane.PREFILL, 99)
    for _ in range(6):
        sim.run_stream(Lane.PRIMARY, 1)
        sim.step_worker()
        sim.step_engine()


def last_decoder_retires(sim: Sim) -> None:
    """The only decode row ends while the prefill is still running."""
    sim.add(1, list(range(6)), 5)
    sim.turn()
    sim.add(2, list(range(40, 60)), 2)
    for _ in range(5):
        sim.turn(prefill=0)


def abort_in_flight(sim: Sim) -> None:
    """The prefill's request is aborted before its join, and others want its pages."""
    sim.add(1, list(range(6)), 6)
    sim.turn()
    sim.add(2, list(range(40, 66)), 3)
    sim.turn(prefill=0)
    sim.engine.submit(Abort(1, (2,)), NOW)
    sim.add(3, list(range(100, 124)), 1)
    sim.turn(prefill=0)


def lost_result(sim: Sim) -> None:
    """The prefill is complete, and its result comes back without its tokens."""

    def lose(result: StepResult) -> StepResult:
        if not any(prefill.step in sim.executor.lane_steps for prefill in result.prefills):
            return result
        lost = [msgspec.structs.replace(prefill, tokens=b"") for prefill in result.prefills]
        return msgspec.structs.replace(result, prefills=lost)

    sim.executor.tamper = lose
    sim.add(1, list(range(6)), 8)
    sim.turn()
    sim.add(2, list(range(40, 60)), 2)
    sim.turn(prefill=0)


def two_ranks(sim: Sim) -> None:
    """One rank's prefill is complete two steps before the other's."""
    sim.add(1, list(range(6)), 5)
    sim.turn()
    sim.add(2, list(range(40, 52)), 1)
    for _ in range(2):
        sim.turn(prefill=0)
        sim.ranks[0].run_stream(Lane.PREFILL, 99)
    sim.turn(prefill=0)


def preemption(sim: Sim) -> None:
    """Pages run out: the youngest row, its prefill in flight, is preempted and computed again."""
    sim.add(1, list(range(5)), 9)
    sim.turn()
    sim.add(2, list(range(40, 56)), 2)
    for _ in range(8):
        sim.turn(prefill=0)


def shutdown_when(state: BatchState | None) -> Callable[[Sim], None]:
    """The workers are told to leave when the prefill batch is in this state; None: before a rank has taken its plan."""

    def moves(sim: Sim) -> None:
        sim.add(1, list(range(6)), 8)
        sim.turn()
        sim.add(2, list(range(40, 60)), 2)
        sim.step_engine()
        if state is not None:
            sim.step_worker()
        if state is not None and state >= BatchState.CORE_OWNED:
            sim.turn(prefill=99 if state >= BatchState.COMPLETE else 0)
        if state is BatchState.APPLIED:
            sim.turn()
            sim.turn()
        sim.shut_down()

    moves.__name__ = f"shutdown_{'submitted' if state is None else state.name.lower()}"
    return moves


SCENARIOS = (
    Scenario(prefill_with_decode),
    Scenario(goes_on_on_the_lane),
    Scenario(joins_in_flight),
    Scenario(last_decoder_retires),
    Scenario(abort_in_flight, pages=12),
    Scenario(lost_result, loses_result=True),
    Scenario(two_ranks, ranks=2),
    Scenario(preemption, pages=7),
    *(Scenario(shutdown_when(state)) for state in (None, *BatchState)),
)


def check(scenario: Scenario, sim: Sim) -> str:
    """Which of the allowed outcomes this was: "abort", "lost", "delivered" or "unharmed"; anything else fails."""
    sim.check_tokens()
    assert set(sim.finishes) == set(sim.prompts), "a request never ended"
    assert {finish.reason for finish in sim.finishes.values()} <= {FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR}
    for rank in sim.ranks:
        assert rank.errors_unproven == [], "an error left the worker before its lane was proven"
        assert rank.freed_unproven == [], "memory was freed without proof"
        if rank.abort_cause is not None:
            assert "unordered" not in rank.abort_cause, "a race was detected"
            assert len(rank.table.calls) == rank.calls_at_abort, "driver calls were made after the abort"
    errors = [finish for finish in sim.finishes.values() if finish.reason == FINISH_ERROR]
    _check_told(errors, sim.engine_dead)
    if sim.engine_dead is not None:
        return _check_end(scenario, sim)
    assert sim.aborted is None, "nobody noticed that a worker died"
    gauges = sim.scheduler.gauges()
    assert gauges.pages_referenced + gauges.pages_retiring == 0, "pages never came back"
    assert gauges.pages_free + gauges.pages_cached == gauges.pages_total
    assert all(rank.table.live_events <= LEAKED_EVENTS for rank in sim.ranks)
    return "delivered" if errors else "unharmed"


LEAKED_EVENTS = 2
"""What a fault or two may leak: a create that took effect and answered an error, a destroy that was refused."""


def _check_told(errors: list[Finish], end: str | None) -> None:
    """Failed work is INTERNAL; whoever fails with the whole engine is UNAVAILABLE and hears why it ended."""
    for finish in errors:
        assert finish.error is not None
        if finish.error.code is not StatusCode.INTERNAL:
            assert finish.error.code is StatusCode.UNAVAILABLE
            assert end is not None
            assert end in finish.error.message


def _check_end(scenario: Scenario, sim: Sim) -> str:
    """Why the engine ended: a worker aborted, a result was lost where the scenario loses one, or it was shut down."""
    assert sim.engine_dead is not None
    if any(f"aborted: {rank.abort_cause}" in sim.engine_dead for rank in sim.ranks):
        return "abort"
    if scenario.loses_result and "its result was lost or doesn't match its plan" in sim.engine_dead:
        return "lost"
    assert sim.engine_dead == SHUT_DOWN
    return "unharmed" if sim.aborted is None else "abort"
