"""The table of faults and the jobs that play it: (scenario, mode, depth) x driver call x kind of fault.

A job is a value that names its share, so that several processes can work on one table; what it returns is counted.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
from collections import Counter
from dataclasses import dataclass

from engine_core.device.driver import Status
from tests.sim.harness import Sim
from tests.sim.rank import HANG, PythonFault
from tests.sim.scenarios import SCENARIOS, Scenario, check

MODES = ("stream", "green")
DEPTHS = (1, 2, 3)


@dataclass(frozen=True)
class Fault:
    """A driver call answers `status`, having done its work or not, once or from then on."""

    status: int
    takes_effect: bool = False
    sticky: bool = False

    @property
    def answer(self) -> tuple[int, bool]:
        return self.status, self.takes_effect


ERRORS = (Status.OUT_OF_MEMORY, Status.INVALID_HANDLE, Status.ILLEGAL_ADDRESS)
"""A full device, a refused call, an earlier asynchronous error that surfaces here."""
ANSWERS = (*itertools.product(ERRORS, (True, False)), (HANG, False))
FAULTS = tuple((Fault(*answer), Fault(*answer, sticky=True)) for answer in ANSWERS)
"""Met once, and from then on."""
SECOND = Fault(Status.LAUNCH_FAILED)
"""The one class of error in double faults; each of the two is met once."""
DOUBLE_DEPTH = 2
SINGLE, DOUBLE, PYTHON = "single", "double", "python"
SHARES = 2
"""Jobs of one (scenario, mode, depth), each with every SHARES-th driver call."""
PYTHON_ERRORS = ((False, MemoryError), (True, RuntimeError))
"""Before a method of Compute does anything, and when all its work is enqueued."""
GUARDED = ("forward", "sample", "read")


@dataclass(frozen=True)
class Job:
    scenario: str
    mode: str
    depth: int
    share: int
    table: str

    def find(self) -> Scenario:
        return next(scenario for scenario in SCENARIOS if scenario.name == self.scenario)


@functools.cache
def calls_of(scenario: Scenario, mode: str, depth: int, failing: int | None = None) -> int:
    """Driver calls that the scenario makes, without a fault or when call number `failing` meets one (SECOND)."""
    sim = scenario.build(mode, depth)
    sim.faults.armed = {} if failing is None else {failing: SECOND.answer}
    scenario.play(sim)
    return sim.faults.count


def single_faults(scenario: Scenario, mode: str) -> int:
    """Cases of the table of single faults: calls x kinds of fault."""
    return sum(calls_of(scenario, mode, depth) for depth in DEPTHS) * sum(map(len, FAULTS))


@functools.cache
def double_faults(scenario: Scenario, mode: str) -> int:
    """Cases of the table of double faults: pairs of calls, the second one made after the first has failed."""
    calls = range(1, calls_of(scenario, mode, DOUBLE_DEPTH) + 1)
    return sum(calls_of(scenario, mode, DOUBLE_DEPTH, at) - at for at in calls)


def python_errors(scenario: Scenario, mode: str) -> int:
    """Cases of the table of Python errors: calls of guarded methods on the first rank x kinds of error."""
    counts = (_guarded_calls(scenario, mode, depth) for depth in DEPTHS)
    return sum(sum(count.values()) for count in counts) * len(PYTHON_ERRORS)


def _guarded_calls(scenario: Scenario, mode: str, depth: int) -> dict[str, int]:
    counts = scenario.play(scenario.build(mode, depth)).ranks[0].python_fault.counts
    return {method: counts.get(method, 0) for method in GUARDED}


def run(job: Job) -> Counter[str]:
    """Play the job's cases and check each; how many came out how. The first that is wrong raises, and says which."""
    logging.disable()
    gc.disable()  # a simulation frees itself but for a few cycles, and a job's remain small
    try:
        return _run(job, job.find())
    finally:
        gc.enable()


def _run(job: Job, scenario: Scenario) -> Counter[str]:
    if job.table == PYTHON:
        return _python_errors(job, scenario)
    calls = range(1 + job.share, calls_of(scenario, job.mode, job.depth) + 1, SHARES)
    return (_double_faults if job.table == DOUBLE else _single_faults)(job, scenario, calls)


def _single_faults(job: Job, scenario: Scenario, calls: range) -> Counter[str]:
    """A fault that stays is the same run as the one that doesn't, if that made no further call: it is played once."""
    outcomes: Counter[str] = Counter()
    for at, (once, sticky) in itertools.product(calls, FAULTS):
        outcome, last = _play(job, scenario, {at: once.answer})
        outcomes[outcome] += 1
        if last > at:
            outcome, _ = _play(job, scenario, {at: sticky.answer}, sticky=True)
        outcomes[outcome] += 1
    return outcomes


def _double_faults(job: Job, scenario: Scenario, calls: range) -> Counter[str]:
    """Each call fails, and with it, one at a time, each that is made after it."""
    outcomes: Counter[str] = Counter()
    for at in calls:
        for second in range(at + 1, calls_of(scenario, job.mode, job.depth, at) + 1):
            outcome, _ = _play(job, scenario, {at: SECOND.answer, second: SECOND.answer})
            outcomes[outcome] += 1
    return outcomes


def _play(job: Job, scenario: Scenario, armed: dict[int, tuple[int, bool]], *, sticky: bool = False) -> tuple[str, int]:
    """How it came out, and how many driver calls were made."""
    sim = scenario.build(job.mode, job.depth)
    sim.faults.armed, sim.faults.sticky = armed, sticky
    return _outcome(scenario, sim, f"{job}, faults {armed}, sticky {sticky}"), sim.faults.count


def _python_errors(job: Job, scenario: Scenario) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for method, count in _guarded_calls(scenario, job.mode, job.depth).items():
        for nth, (after, error) in itertools.product(range(1, count + 1), PYTHON_ERRORS):
            sim = scenario.build(job.mode, job.depth)
            fault = PythonFault(method, nth, after, error)
            sim.ranks[0].python_fault = fault
            outcomes[_outcome(scenario, sim, f"{job}, {fault}")] += 1
    return outcomes


def _outcome(scenario: Scenario, sim: Sim, case: str) -> str:
    try:
        return check(scenario, scenario.play(sim))
    except Exception as error:
        raise AssertionError(f"{case}: {error}") from error
