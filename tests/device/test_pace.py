"""Plans that arrive beside a prefill are launched shortly before the step ahead of them ends."""

from __future__ import annotations

import pytest

from engine_core.executor.channel import Plan, Quiesce, Quiesced, Result
from engine_core.step import Lane, PrefillChunk, StepResult
from engine_core.worker.pace import LEAD_S
from engine_core.worker.worker import TIMER_S
from tests.device.rig import plan, row
from tests.device.test_worker import IDS, WorkerRig

STEP_S = 0.010
OPERATIONS = 2
"""Of a decode step on its stream: the forward with the drawing, and the completion."""


def results(rig: WorkerRig) -> dict[int, StepResult]:
    return {body.result.step: body.result for body in rig.said() if isinstance(body, Result)}


def queued(rig: WorkerRig, lane: Lane) -> int:
    return len(rig.streams[lane].queue)


@pytest.fixture
def rig() -> WorkerRig:
    """Steps 2 (complete) and 3 ran beside the prefill that step 2 launched; plan 4 has just arrived."""
    rig = WorkerRig()
    rig.deliver(Plan(plan(1, starts=[row(0, [1, 2], [0, 3])], chunks=[PrefillChunk(0, 0, 2, True)])))
    rig.worker.step()
    rig.table.run_all()
    starts, chunks = [row(1, IDS, [1, 2])], [PrefillChunk(1, 0, len(IDS), True)]
    rig.deliver(Plan(plan(2, starts=starts, decode=[0], chunks=chunks, lane=True)))
    rig.worker.step()
    rig.deliver(Plan(plan(3, decode=[0])))
    rig.worker.step()
    rig.now = STEP_S
    rig.table.run(rig.streams[Lane.PRIMARY], OPERATIONS)
    rig.worker.step()
    assert list(results(rig)) == [1, 2]
    rig.deliver(Plan(plan(4, decode=[0])))
    rig.worker.step()
    return rig


def test_a_plan_is_held_until_the_step_ahead_is_about_to_end(rig: WorkerRig) -> None:
    """Red when a plan beside a prefill is launched as it comes, or slept over."""
    before = queued(rig, Lane.PRIMARY)
    assert rig.worker.awaited(rig.now)[1] == pytest.approx(STEP_S - LEAD_S - TIMER_S)
    rig.now += STEP_S - LEAD_S - 2 * TIMER_S
    rig.worker.step()
    assert queued(rig, Lane.PRIMARY) == before
    rig.now += 1.5 * TIMER_S
    rig.worker.step()
    assert queued(rig, Lane.PRIMARY) == before + OPERATIONS


def test_a_batch_that_completes_meanwhile_draws_ahead_of_the_held_plan(rig: WorkerRig) -> None:
    """Red when its first tokens wait for a step that was enqueued before anybody needed it."""
    rig.table.run(rig.streams[Lane.PREFILL], 99)
    rig.now += STEP_S - LEAD_S
    rig.worker.step()
    rig.table.run_all()
    rig.worker.step()
    assert [len(result.prefills) for _, result in sorted(results(rig).items())] == [1, 0, 1, 0]


def test_what_arrives_behind_a_held_plan_is_handled_behind_it(rig: WorkerRig) -> None:
    """Red when lanes are proven idle, or a step launched, ahead of a plan that came before."""
    rig.deliver(Quiesce(7))
    rig.worker.step()
    assert Quiesced(7) in rig.said()
    assert sorted(results(rig)) == [1, 2, 3, 4]


def test_a_plan_behind_nothing_is_launched_at_once(rig: WorkerRig) -> None:
    """Red when a step that took longer than expected leaves the GPU idle behind it."""
    rig.now += STEP_S / 2
    rig.table.run(rig.streams[Lane.PRIMARY], 99)
    rig.worker.step()
    assert queued(rig, Lane.PRIMARY) == OPERATIONS
