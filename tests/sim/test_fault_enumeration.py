"""Every driver call of every scenario fails in every way; only two outcomes are allowed.

Either the error is delivered to that work's requests with their lanes proven idle, and everybody else's tokens are
right; or the worker aborts at once, makes no further driver call, frees nothing that wasn't proven, and every open
request hears of it with the cause. Rules E3 to E6, O1 to O6, O8, O9, O12 to O14, L7.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest

from tests.sim.enumeration import (
    DEPTHS,
    DOUBLE,
    DOUBLE_DEPTH,
    MODES,
    PYTHON,
    SHARES,
    SINGLE,
    Job,
    double_faults,
    python_errors,
    run,
    single_faults,
)
from tests.sim.scenarios import SCENARIOS, Scenario, joins_in_flight

MINIMUM_SINGLE_FAULTS = 50148
MINIMUM_DOUBLE_FAULTS = 12916
MINIMUM_PYTHON_ERRORS = 3360
"""The table as it was committed. A smaller one has lost scenarios, calls or kinds of fault."""

by_name = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
by_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    """As many processes as there are cores for this one."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=spawn) as executor:
        yield executor


def played(pool: Executor, jobs: list[Job]) -> Counter[str]:
    """The jobs' outcomes together."""
    return sum(pool.map(run, jobs), Counter[str]())


@by_mode
@by_name
def test_every_single_fault(scenario: Scenario, mode: str, pool: Executor) -> None:
    """O1, E3 to E6: red when any driver failure leads to anything but the two allowed outcomes."""
    jobs = [Job(scenario.name, mode, depth, share, SINGLE) for depth in DEPTHS for share in range(SHARES)]
    outcomes = played(pool, jobs)
    print(f"{scenario.name}/{mode}: {outcomes.total()} single faults, {dict(outcomes)}")
    assert outcomes.total() == single_faults(scenario, mode)
    assert outcomes["abort"] > 0


@by_mode
@by_name
def test_one_more_fault_after_every_fault(scenario: Scenario, mode: str, pool: Executor) -> None:
    """O9, E4: red when a failure during the clean-up of another one leads to anything but the allowed outcomes."""
    jobs = [Job(scenario.name, mode, DOUBLE_DEPTH, share, DOUBLE) for share in range(SHARES)]
    outcomes = played(pool, jobs)
    print(f"{scenario.name}/{mode}: {outcomes.total()} double faults, {dict(outcomes)}")
    assert outcomes.total() == double_faults(scenario, mode)
    assert outcomes["abort"] > 0


@by_mode
@by_name
def test_python_errors_are_delivered_and_survived(scenario: Scenario, mode: str, pool: Executor) -> None:
    """O2, O4, O14: red when an error of Python code in guarded work ends the worker, or harms anybody else."""
    outcomes = played(pool, [Job(scenario.name, mode, depth, 0, PYTHON) for depth in DEPTHS])
    print(f"{scenario.name}/{mode}: {outcomes.total()} Python errors, {dict(outcomes)}")
    assert outcomes.total() == python_errors(scenario, mode)
    assert outcomes["abort"] == 0


@by_mode
@pytest.mark.parametrize("depth", [2, 3])
def test_a_scenario_joins_a_step_in_flight(mode: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when no scenario's batch travels with a step that was launched before: no fault would meet such a join."""
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.moves is joins_in_flight)
    sim, seen = scenario.build(mode, depth), list[bool]()
    step_worker = sim.step_worker

    def watched() -> None:
        step_worker()
        seen.append(any(flight.superseded for flight in sim.ranks[0].runner._steps))

    monkeypatch.setattr(sim, "step_worker", watched)
    scenario.play(sim)
    assert any(seen)


def test_the_tables_have_not_shrunk() -> None:
    """Red when scenarios, driver calls or kinds of fault go missing from the enumeration."""
    tables = [(scenario, mode) for scenario in SCENARIOS for mode in MODES]
    single = sum(single_faults(scenario, mode) for scenario, mode in tables)
    double = sum(double_faults(scenario, mode) for scenario, mode in tables)
    python = sum(python_errors(scenario, mode) for scenario, mode in tables)
    print(f"{single} single faults, {double} double faults, {python} Python errors")
    assert single >= MINIMUM_SINGLE_FAULTS
    assert double >= MINIMUM_DOUBLE_FAULTS
    assert python >= MINIMUM_PYTHON_ERRORS
