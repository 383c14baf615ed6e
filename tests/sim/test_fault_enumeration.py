"""Every driver call of every scenario fails in every way; only two outcomes are allowed.

Either the error is delivered to that work's requests with their lanes proven idle, and everybody else's tokens are right;
or the worker aborts at once, makes no further driver call, frees nothing that wasn't proven, and every open request hears
of it with the cause. Rules E3 to E6, O1 to O6, O9, O12 to O14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engine_core.device.driver import Status
from engine_core.errors import StatusCode
from engine_core.request import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, Abort
from engine_core.step import Lane
from tests.sim.harness import HANG, Sim


def turn(sim: Sim, *, streams: int = 99) -> None:
    """The engine, the worker, some GPU progress, the worker."""
    sim.step_engine()
    sim.step_worker()
    sim.run_stream(Lane.PRIMARY, 99)
    sim.run_stream(Lane.PREFILL, streams)
    sim.step_worker()


def prefill_with_decode(sim: Sim) -> None:
    """A long prompt arrives while another request decodes."""
    sim.add(1, list(range(6)), 8)
    turn(sim)
    sim.add(2, list(range(40, 80)), 3)
    for _ in range(3):
        turn(sim, streams=0)


def last_decoder_retires(sim: Sim) -> None:
    """The only decode row ends while the prefill is still running."""
    sim.add(1, list(range(6)), 3)
    turn(sim)
    sim.add(2, list(range(40, 60)), 2)
    for _ in range(5):
        turn(sim, streams=0)


def abort_in_flight(sim: Sim) -> None:
    """The prefill's request is aborted before its join, and others want its pages."""
    sim.add(1, list(range(6)), 10)
    turn(sim)
    sim.add(2, list(range(40, 80)), 3)
    turn(sim, streams=0)
    sim.engine.submit(Abort(1, (2,)), sim.now)
    sim.add(3, list(range(100, 130)), 2)
    turn(sim, streams=0)


def preemption(sim: Sim) -> None:
    """Pages run out; a row is preempted and recomputed."""
    for number in range(1, 4):
        sim.add(number, list(range(number * 50, number * 50 + 32)), 6)
        turn(sim)


def shutdown(sim: Sim) -> None:
    """The worker is told to leave with work of both lanes in flight."""
    sim.add(1, list(range(6)), 8)
    turn(sim)
    sim.add(2, list(range(40, 80)), 3)
    sim.step_engine()
    sim.step_worker()
    sim.shut_down()


SCENARIOS: tuple[Callable[[Sim], None], ...] = (
    prefill_with_decode,
    last_decoder_retires,
    abort_in_flight,
    preemption,
    shutdown,
)
STATUSES = (Status.INVALID_VALUE, Status.OUT_OF_MEMORY, Status.INVALID_HANDLE, Status.ILLEGAL_ADDRESS, HANG)
"""A refused call, a full device, a wrong handle, an earlier asynchronous error that surfaces here, no answer."""
MODES = ("stream", "green")
DEPTHS = (1, 2, 3)
EXPECTED_CASES_AT_LEAST = 20000


@dataclass(frozen=True)
class Case:
    scenario: Callable[[Sim], None]
    mode: str
    depth: int
    at: int
    status: int
    takes_effect: bool
    sticky: bool


def build(mode: str, depth: int) -> Sim:
    return Sim(overlap=mode, depth=depth, pages=26)


def play(case: Case) -> Sim:
    sim = build(case.mode, case.depth)
    sim.faults.armed = {case.at: (case.status, case.takes_effect)}
    sim.faults.sticky = case.sticky
    case.scenario(sim)
    sim.settle()
    return sim


def calls_of(scenario: Callable[[Sim], None], mode: str, depth: int) -> int:
    """Driver calls of the scenario without a fault."""
    sim = build(mode, depth)
    scenario(sim)
    sim.settle()
    assert sim.abort_cause is None
    assert sim.engine_dead in (None, "shut down")
    return sim.faults.count


def check(sim: Sim) -> str:
    """Which of the allowed outcomes this was; anything else fails."""
    sim.check_tokens()
    assert sim.errors_unproven == [], "an error left the worker before its lane was proven"
    assert set(sim.finishes) == set(sim.prompts), "a request never ended"
    if sim.abort_cause is not None:
        assert len(sim.table.calls) == sim.calls_at_abort, "driver calls were made after the abort"
        assert sim.freed_unproven == [], "memory was released without proof"
        for finish in sim.finishes.values():
            if finish.reason == FINISH_ERROR:
                assert finish.error is not None
                told = sim.abort_cause in finish.error.message or finish.error.message == "shut down"
                assert finish.error.code is StatusCode.INTERNAL or (
                    finish.error.code is StatusCode.UNAVAILABLE and told
                )
        return "abort"
    for finish in sim.finishes.values():
        assert finish.reason in (FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR)
        if finish.reason == FINISH_ERROR:
            assert finish.error is not None
            assert finish.error.code is StatusCode.INTERNAL or finish.error.message == "shut down"
    if sim.engine_dead is None:
        gauges = sim.scheduler.gauges()
        assert gauges.pages_referenced + gauges.pages_retiring == 0
    return "delivered" if any(f.reason == FINISH_ERROR for f in sim.finishes.values()) else "unharmed"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_single_fault(scenario: Callable[[Sim], None], mode: str, record_property: Callable[..., None]) -> None:
    """O1, E3 to E6: red when any driver failure leads to anything but the two allowed outcomes."""
    outcomes = {"abort": 0, "delivered": 0, "unharmed": 0}
    cases = 0
    for depth in DEPTHS:
        calls = calls_of(scenario, mode, depth)
        for at in range(1, calls + 1):
            for status in STATUSES:
                for takes_effect in (True, False):
                    for sticky in (True, False):
                        outcomes[check(play(Case(scenario, mode, depth, at, status, takes_effect, sticky)))] += 1
                        cases += 1
    assert cases == sum(outcomes.values())
    record_property("cases", cases)
    print(f"{scenario.__name__}/{mode}: {cases} cases, {outcomes}")
