"""Prefill batches on a lane of their own: launched, core-owned, complete, applied; decode goes on beside them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from engine_core.errors import EngineDead, StatusCode
from engine_core.request import FINISH_ERROR, FINISH_LENGTH, Abort
from engine_core.scheduling.flight import BatchState, Flight, PrefillBatch
from engine_core.scheduling.outputs import Events
from engine_core.scheduling.policy import FixedPolicy
from engine_core.scheduling.step_model import Observed, Work
from engine_core.step import PrefillResult, StepResult
from tests.engine.rig import Rig
from tests.engine.simulated_model import expected_tokens
from tests.engine.simulated_worker import LANE_US, STEP_US

PROMPT = [1, 2, 3, 4, 5, 6]
LONG = [7 + i % 30 for i in range(20)]


def ints(data: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(data, "<i4")]


def decoding_rig(depth: int = 1, **options: Any) -> Rig:
    """A rig with a sequence that decodes already."""
    rig = Rig(overlap=True, async_depth=depth, **options)
    rig.add(PROMPT, max_tokens=60, seed=5)
    rig.turn()
    rig.turn()
    assert rig.worker.plans[-1].decode_slots
    return rig


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prefill_without_decode_beside_it_has_the_whole_gpu(depth: int) -> None:
    """Rule L6. Red when a prompt is confined to the prefill lane although no row decodes."""
    rig = Rig(overlap=True, async_depth=depth, max_num_batched_tokens=8)
    request = rig.add(LONG, max_tokens=3)
    rig.run()
    assert not any(plan.prefill_lane for plan in rig.worker.plans)
    assert [chunk.length for plan in rig.worker.plans for chunk in plan.chunks] == [8, 8, 4]
    assert rig.of(request).tokens == expected_tokens(request, 0)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_prompt_may_begin_on_the_primary_lane_and_end_on_its_own(depth: int) -> None:
    """Rule L6. Red when a prompt's chunks are on both lanes at a time, or one is left out at the change of lanes."""
    rig = Rig(overlap=True, async_depth=depth, max_num_batched_tokens=8)
    first, second = rig.add(PROMPT, max_tokens=20), rig.add(LONG, max_tokens=3)
    rig.run()
    placed = [(plan.prefill_lane, chunk.slot, chunk.length) for plan in rig.worker.plans for chunk in plan.chunks]
    assert placed == [(False, 0, 6), (False, 1, 2), (True, 1, 8), (True, 1, 8), (True, 1, 2)]
    for request in (first, second):
        assert rig.of(request).tokens == expected_tokens(request, 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_decode_goes_on_beside_a_prefill(depth: int) -> None:
    """Red when decoding rows wait for a prompt on the other lane, its row decodes before the join, or its first token
    goes out behind theirs."""
    rig = decoding_rig(depth)
    request = rig.add(LONG, max_tokens=4)
    launched = len(rig.worker.plans)
    for _ in range(6):
        rig.worker.finish_step()
        rig.step()
    batch = [plan for plan in rig.worker.plans[launched:] if plan.prefill_lane]
    assert len(batch) == 1
    assert [(chunk.start, chunk.length, chunk.last) for chunk in batch[0].chunks] == [(0, 20, True)]
    assert all(ints(plan.decode_slots) == [0] for plan in rig.worker.plans[launched:])
    assert rig.of(request).tokens == []
    rig.worker.finish_prefill()
    rig.worker.finish_step()
    rig.step()
    assert rig.of(request).tokens == expected_tokens(request, 0)[:1]
    (output,) = rig.published[-1]
    assert output.numbers.tolist() == [request.number, 1]
    rig.run()
    assert rig.of(request).tokens == expected_tokens(request, 0)


def test_one_batch_is_in_flight_at_a_time() -> None:
    """Rule L6. Red when a second prompt is launched before the first one has joined."""
    rig = decoding_rig()
    rig.add(LONG, max_tokens=2)
    rig.worker.finish_step()
    rig.step()
    second = rig.add([9] * 10, max_tokens=2)
    for _ in range(3):
        rig.worker.finish_step()
        rig.step()
        assert rig.engine.stats().prefills_in_flight == 1
    assert rig.of(second).cached is None
    rig.worker.finish_prefill()
    rig.worker.finish_step()
    rig.step()
    assert rig.of(second).cached == 0
    assert rig.engine.stats().prefill_launches == 3
    rig.run()


def test_long_prompts_take_one_batch_after_another() -> None:
    """Red when a batch exceeds the token budget, or the next one waits for anything but the join."""
    rig = decoding_rig(max_num_batched_tokens=8)
    request = rig.add(LONG, max_tokens=2)
    rig.run()
    lengths = [chunk.length for plan in rig.worker.plans if plan.prefill_lane for chunk in plan.chunks]
    assert lengths == [8, 8, 4]
    assert rig.of(request).tokens == expected_tokens(request, 0)


def test_a_lone_prefill_is_asked_for_by_one_empty_plan() -> None:
    """Rule E7. Red when a prefill's result waits for somebody else's request, or the engine polls for it."""
    rig = decoding_rig(depth=2)
    request = rig.add(LONG, max_tokens=1)
    rig.worker.finish_step()
    rig.step()
    launched = len(rig.worker.plans)
    assert rig.worker.plans[-1].prefill_lane
    rig.engine.submit(Abort(1, (1,)), 0.0)
    for _ in range(5):
        rig.worker.finish_step()
        rig.step()
        rig.worker.finish_step()
    assert len(rig.worker.plans) == launched + 1
    empty = rig.worker.plans[-1]
    assert (empty.decode_slots, empty.starts, empty.page_ids) == (b"", [], b"")
    rig.worker.finish_prefill()
    assert rig.worker.finish_step()
    rig.step()
    assert rig.of(request).tokens == expected_tokens(request, 0)
    assert len(rig.worker.plans) == launched + 1
    rig.check_settled()


def test_pages_become_visible_at_the_join() -> None:
    """Rule O8. Red when a prompt in flight is found by another before it is proven complete."""
    rig = decoding_rig()
    rig.add(LONG, max_tokens=2)
    rig.worker.finish_step()
    rig.step()
    same = rig.request(LONG, max_tokens=2)
    assert rig.scheduler.residency.lookup(rig.scheduler.add(same)[0]) == []
    rig.scheduler.abort(1, (same.number,))
    rig.worker.finish_prefill()
    rig.worker.finish_step()
    rig.step()
    again = rig.add(LONG, max_tokens=2)
    rig.run()
    assert rig.of(again).cached == 16


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_in_flight_keeps_pages_until_the_join(depth: int) -> None:
    """Rules O10, O11. Red when the pages, or the slot, of a launched prompt come back before its lane is proven."""
    rig = decoding_rig(depth, max_num_seqs=2)
    request = rig.add(LONG, max_tokens=9)
    rig.worker.finish_step()
    rig.step()
    rig.engine.submit(Abort(1, (request.number,)), 0.0)
    waiting = rig.add([3] * 4, max_tokens=2)
    for _ in range(depth + 4):
        rig.worker.finish_step()
        rig.step()
        assert rig.engine.stats().pages_retiring == 5
    assert rig.of(waiting).cached is None
    rig.worker.finish_prefill()
    rig.worker.finish_step()
    rig.step()
    assert rig.engine.stats().pages_retiring == 0
    assert rig.of(request).tokens == []
    assert rig.engine.stats().rows_discarded == 1
    assert rig.of(waiting).cached == 0
    rig.run()
    rig.check_settled()


def test_the_core_owns_a_prefill_before_it_applies_its_step_s_decode_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule O7. Red when a failure among the decode results finds the launched prefill owned by nobody."""
    rig = decoding_rig()
    rig.add(LONG, max_tokens=2)
    rig.worker.finish_step()
    rig.step()
    batch = rig.scheduler.in_flight.batch
    assert batch is not None
    assert batch.state is BatchState.LAUNCHED
    rig.worker.finish_step()
    (result,) = rig.worker.collect()
    states: list[BatchState] = []

    def apply_decode(flight: Flight, result: StepResult, events: Events) -> None:
        states.append(batch.state)

    monkeypatch.setattr(rig.scheduler.results, "_apply_decode", apply_decode)
    rig.scheduler.apply(result)
    assert states == [BatchState.CORE_OWNED]


def test_ownership_states_follow_one_another() -> None:
    batch = PrefillBatch(3, [])
    for skipped in (BatchState.COMPLETE, BatchState.APPLIED, BatchState.LAUNCHED):
        with pytest.raises(RuntimeError, match="LAUNCHED"):
            batch.advance(skipped)
    for state in (BatchState.CORE_OWNED, BatchState.COMPLETE, BatchState.APPLIED):
        batch.advance(state)
    with pytest.raises(RuntimeError):
        batch.advance(BatchState.APPLIED)


def test_a_failed_batch_fails_its_own_sequences() -> None:
    rig = decoding_rig()
    request = rig.add(LONG, max_tokens=4)
    rig.worker.fail_prefills[len(rig.worker.plans) + 1] = "OutOfMemoryError: no"
    rig.run()
    finish = rig.finish(request)
    assert finish.error is not None
    assert (finish.reason, finish.error.code, finish.error.message) == (
        FINISH_ERROR,
        StatusCode.INTERNAL,
        "OutOfMemoryError: no",
    )
    assert rig.seen[1, 1].finish is not None
    assert rig.seen[1, 1].finish.reason == FINISH_LENGTH
    rig.check_settled()


def test_a_failed_step_leaves_the_batch_beside_it_alone() -> None:
    """Red when the decode forward's failure takes the prompt on the other lane along, or forgets its batch."""
    rig = decoding_rig()
    request = rig.add(LONG, max_tokens=4)
    rig.worker.fail_steps[len(rig.worker.plans) + 1] = "RuntimeError: no"
    rig.run()
    assert rig.of(request).tokens == expected_tokens(request, 0)
    assert rig.seen[1, 1].finish is not None
    assert rig.seen[1, 1].finish.reason == FINISH_ERROR
    rig.check_settled()


def test_a_lost_join_fails_its_prompt_and_stops_the_engine() -> None:
    """Rule O8. Red when a batch whose result doesn't match is forgiven, or its pages are used again."""
    rig = decoding_rig()
    request = rig.add(LONG, max_tokens=4)
    rig.worker.finish_step()
    rig.step()
    rig.worker.finish_prefill()
    rig.worker.finish_step()
    (result,) = rig.worker.collect()
    (prefill,) = result.prefills
    rig.worker.hold([msgspec.structs.replace(result, prefills=[msgspec.structs.replace(prefill, tokens=b"")])])
    with pytest.raises(EngineDead):
        rig.engine.step(0.0)
    rig.engine.fail_all("lost")
    error = rig.finish(request).error
    assert error is not None
    assert error.code is StatusCode.INTERNAL
    assert rig.engine.stats().pages_referenced >= 5


def test_a_batch_can_t_complete_before_its_step_is_answered() -> None:
    """Red when a prefill is applied that the core doesn't own yet (rule O7)."""
    rig = decoding_rig(depth=2)
    rig.add(LONG, max_tokens=4)
    rig.worker.finish_step()
    rig.step()
    batch = rig.scheduler.in_flight.batch
    assert batch is not None
    while rig.worker.plans[-1].step > batch.step:
        rig.worker.finish_step()
    rig.worker.finish_step()
    (result,) = rig.worker.collect()[:1]
    assert result.step < batch.step
    early = msgspec.structs.replace(result, prefills=[PrefillResult(batch.step, b"\0" * 4)])
    rig.worker.hold([early])
    with pytest.raises(EngineDead, match="before its step was answered"):
        rig.engine.step(0.0)


class Listening(FixedPolicy):
    """Remembers what work took."""

    def __init__(self, *, lane: bool) -> None:
        super().__init__(8, lane=lane)
        self.seen: list[Observed] = []

    def observe(self, observed: Observed) -> None:
        self.seen.append(observed)


@pytest.mark.parametrize("lane", [False, True])
def test_the_policy_learns_what_each_kind_of_work_took(lane: bool) -> None:
    """Red when a step beside a batch teaches what decode takes alone, or the time of a batch or a mixed step is lost:
    then `auto` goes on predicting what it measured at start."""
    policy = Listening(lane=lane)
    rig = Rig(overlap=lane, policy=policy, async_depth=1, max_num_batched_tokens=8)
    rig.add(PROMPT, max_tokens=60, seed=5)
    rig.turn()
    rig.add(LONG, max_tokens=3)
    for _ in range(4):
        rig.worker.finish_step()
        rig.step()
    rig.run()
    took = {(seen.work, seen.busy_us) for seen in policy.seen if seen.load.rows or seen.work is Work.BATCH}
    beside = {(Work.BATCH, LANE_US), (Work.BESIDE, STEP_US)} if lane else {(Work.MIXED, STEP_US)}
    assert took == {(Work.DECODE, STEP_US), *beside}
    batches = [(seen.tokens, seen.load.history) for seen in policy.seen if seen.work is Work.BATCH]
    assert batches == ([(8, 0), (8, 8), (4, 16)] if lane else [])
