"""What each step computes, plan by plan."""

from __future__ import annotations

import numpy as np
import pytest

from engine_core.request import FINISH_LENGTH, FINISH_STOP, Abort
from engine_core.step import MAX_CHUNKS, PrefillChunk, RowStart, StepPlan
from tests.engine.rig import Rig
from tests.engine.simulated_model import EOS, expected_tokens


def prompt(length: int, first: int = 1) -> list[int]:
    return [1 + (first + i) % 40 for i in range(length)]


def ints(data: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(data, "<i4")]


def plan(rig: Rig, step: int) -> StepPlan:
    return rig.worker.plans[step - 1]


def chunks(step: StepPlan) -> list[tuple[int, int, bool]]:
    """(start, length, last) of each."""
    return [(chunk.start, chunk.length, chunk.last) for chunk in step.chunks]


def started(step: StepPlan) -> list[int]:
    """Prompt lengths, which the tests choose to tell rows apart."""
    return [start.prompt_len for start in step.starts]


def test_one_request_from_start_to_end() -> None:
    """Red when the shape of the simplest life changes: one chunk, then one decode row a step, then nothing."""
    rig = Rig(prefix_caching=False)
    request = rig.add(prompt(6), max_tokens=3)
    rig.run()
    first = plan(rig, 1)
    assert first.starts == [
        RowStart(
            slot=0,
            prompt_len=6,
            ids=np.array(prompt(6), "<i4").tobytes(),
            cached=0,
            pages=np.array([0, 1], "<i4").tobytes(),
            sampling=first.starts[0].sampling,
        )
    ]
    assert first.chunks == [PrefillChunk(slot=0, start=0, length=6, last=True)]
    assert (first.decode_slots, first.page_ids, first.prefill_lane) == (b"", b"", False)
    for step in (2, 3):
        assert (ints(plan(rig, step).decode_slots), plan(rig, step).chunks, plan(rig, step).starts) == ([0], [], [])
    assert len(rig.worker.plans) == 3
    assert rig.of(request).tokens == expected_tokens(request, 0)
    assert (rig.finish(request).reason, rig.finish(request).output_tokens) == (FINISH_LENGTH, 3)
    rig.check_settled()


def test_prompts_are_cut_to_the_token_budget() -> None:
    """Red when a step exceeds its budget, or a chunk is computed twice or left out."""
    rig = Rig(max_num_batched_tokens=8, prefix_caching=False)
    rig.add(prompt(19), max_tokens=1)
    rig.run()
    assert [chunks(step) for step in rig.worker.plans] == [[(0, 8, False)], [(8, 8, False)], [(16, 3, True)]]


def test_a_plan_holds_so_many_chunks_and_no_more() -> None:
    """Red when a flood of tiny prompts makes a plan longer than what a worker plans attention for."""
    rig = Rig(max_num_batched_tokens=256, max_num_seqs=64, prefix_caching=False)
    for first in range(MAX_CHUNKS + 5):
        rig.add(prompt(2, first), max_tokens=1)
    rig.run()
    assert [len(step.chunks) for step in rig.worker.plans] == [MAX_CHUNKS, 5]


def test_decode_rows_come_first_and_prompts_get_the_rest() -> None:
    """Red when a prompt delays a decoding row, or the budget left beside decode rows isn't used."""
    rig = Rig(max_num_batched_tokens=8, prefix_caching=False)
    rig.add(prompt(2), max_tokens=9)
    rig.step()
    rig.add(prompt(20), max_tokens=1)
    rig.turn()
    rig.turn()
    for step in (2, 3):
        assert ints(plan(rig, step).decode_slots) == [0]
    assert [chunks(plan(rig, step)) for step in (2, 3)] == [[(0, 7, False)], [(7, 7, False)]]
    rig.run()


def test_several_prompts_share_a_step() -> None:
    rig = Rig(max_num_batched_tokens=16, prefix_caching=False)
    for length in (5, 6, 7):
        rig.add(prompt(length), max_tokens=2)
    rig.step()
    assert chunks(plan(rig, 1)) == [(0, 5, True), (0, 6, True), (0, 5, False)]


def test_order_is_priority_then_arrival() -> None:
    """Red when the queue forgets priority, or equal priorities overtake one another."""
    rig = Rig(max_num_seqs=1)
    for length, priority in ((3, 1), (4, 0), (5, -2), (6, 0)):
        rig.add(prompt(length), priority=priority, max_tokens=1)
    rig.run()
    assert [length for step in rig.worker.plans for length in started(step)] == [5, 4, 6, 3]


def test_an_urgent_prompt_overtakes_a_long_one_being_computed() -> None:
    """Red when a running prefill keeps the whole budget from a more urgent arrival."""
    rig = Rig(max_num_batched_tokens=8, prefix_caching=False)
    rig.add(prompt(30), max_tokens=1)
    rig.step()
    rig.add(prompt(5), max_tokens=1, priority=-1)
    rig.turn()
    assert chunks(plan(rig, 2)) == [(0, 5, True), (8, 3, False)]
    rig.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_plans_run_ahead_of_results_up_to_the_depth(depth: int) -> None:
    """Red when scheduling waits for a result it doesn't need, or more plans are in flight than allowed."""
    rig = Rig(async_depth=depth)
    rig.add(prompt(3), max_tokens=10)
    rig.step()
    assert len(rig.worker.plans) == depth
    assert rig.engine.stats().steps_in_flight == depth
    for _ in range(3):
        rig.worker.finish_step()
        rig.step()
        assert rig.engine.stats().steps_in_flight == depth
    rig.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_row_is_planned_past_its_known_end(depth: int) -> None:
    """Red when a row is computed for a token that max_tokens excludes: the end is known without its result."""
    rig = Rig(async_depth=depth)
    rig.add(prompt(5), max_tokens=4)
    rig.run()
    assert len(rig.worker.plans) == 4
    assert rig.engine.stats().rows_discarded == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_found_late_costs_depth_minus_one_rows(depth: int) -> None:
    """Red when a late row's token is published, or isn't counted as discarded."""
    rig = Rig(async_depth=depth)
    probe = rig.request(prompt(5), max_tokens=12)
    stop = expected_tokens(probe, 0)[3]
    request = rig.request(prompt(5), max_tokens=12, stop_token_ids=frozenset([stop]))
    expected = expected_tokens(request, 0)
    rig.engine.submit(request, 0.0)
    rig.step()
    while rig.engine.open_count:
        rig.worker.finish_step()
        rig.step()
    rig.run()
    assert rig.of(request).tokens == expected
    assert (rig.finish(request).reason, rig.finish(request).stop_token_id) == (FINISH_STOP, stop)
    assert rig.engine.stats().rows_discarded == depth - 1
    rig.check_settled()


def test_eos_and_stop_ids() -> None:
    """Case 26. Red when the precedence of eos, ignore_eos, stop ids and min_tokens changes."""
    rig = Rig()
    seed = next(s for s in range(999) if EOS in expected_tokens(rig.request(prompt(3), max_tokens=6, seed=s), 0)[1:5])
    free = expected_tokens(rig.request(prompt(3), max_tokens=6, seed=seed), 0)
    at = free.index(EOS)
    ends = {
        "eos": rig.add(prompt(3), max_tokens=6, seed=seed, ignore_eos=False),
        "ignored": rig.add(prompt(3), max_tokens=6, seed=seed),
        "as stop id": rig.add(prompt(3), max_tokens=6, seed=seed, stop_token_ids=frozenset([EOS])),
        "too early": rig.add(prompt(3), max_tokens=6, seed=seed, ignore_eos=False, min_tokens=at + 1),
    }
    rig.run()
    assert rig.of(ends["eos"]).tokens == free[: at + 1]
    assert rig.finish(ends["eos"]).stop_token_id == EOS
    assert rig.of(ends["ignored"]).tokens == free
    assert rig.finish(ends["as stop id"]).stop_token_id == EOS
    assert EOS not in rig.of(ends["too early"]).tokens[: at + 1]


def test_a_stop_id_before_min_tokens_is_a_token_like_any_other() -> None:
    """Red when the engine leaves min_tokens to the worker alone."""
    rig = Rig()
    rig.worker.draws_suppressed = True
    every_id = frozenset(range(48))
    request = rig.add(prompt(3), max_tokens=9, min_tokens=4, stop_token_ids=every_id)
    rig.run()
    assert (rig.finish(request).reason, rig.finish(request).output_tokens) == (FINISH_STOP, 5)


def test_pages_are_taken_when_they_are_needed() -> None:
    """Red when a row gets its next page earlier or later than the position that it feeds."""
    rig = Rig(prefix_caching=False)
    rig.add(prompt(7), max_tokens=7)
    rig.run()
    grown = {step.step: (ints(step.page_slots), ints(step.page_ids)) for step in rig.worker.plans if step.page_ids}
    assert grown == {3: ([0], [2]), 7: ([0], [3])}


def test_a_cached_beginning_isn_t_computed_again() -> None:
    rig = Rig()
    first = rig.add(prompt(10), max_tokens=2)
    rig.run()
    second = rig.add([*prompt(10), 33], max_tokens=2)
    rig.run()
    row = next(step for step in rig.worker.plans if step.starts and step.starts[0].prompt_len == 11)
    assert (row.starts[0].cached, chunks(row)) == (8, [(8, 3, True)])
    assert (rig.of(first).cached, rig.of(second).cached, rig.finish(second).cached_tokens) == (0, 8, 8)
    assert rig.of(second).tokens == expected_tokens(second, 0)


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_wholly_cached_prompt_still_computes_its_last_token(pages: int) -> None:
    """Case 22. Red when a prompt of whole pages leaves nothing to compute, or writes into a shared page."""
    rig = Rig()
    for _ in range(2):
        request = rig.add(prompt(4 * pages), max_tokens=3)
        rig.run()
        assert rig.of(request).tokens == expected_tokens(request, 0)
    assert rig.of(request).cached == 4 * (pages - 1)


def test_generated_pages_are_found_by_the_next_turn() -> None:
    """Red when only prompts are published: a conversation's answer is the beginning of its next prompt."""
    rig = Rig()
    first = rig.add(prompt(6), max_tokens=9)
    rig.run()
    second = rig.add([*prompt(6), *rig.of(first).tokens, 5, 6, 7], max_tokens=2)
    rig.run()
    assert rig.of(second).cached == 12
    assert rig.of(second).tokens == expected_tokens(second, 0)


def test_siblings_wait_for_the_prompt_s_pages() -> None:
    """Red when n sequences compute the same prompt n times, or wait although there is nothing to share."""
    rig = Rig(max_num_batched_tokens=64)
    request = rig.add(prompt(10), n=3, max_tokens=2)
    rig.run()
    assert started(plan(rig, 1)) == [10]
    assert [row.cached for row in plan(rig, 2).starts] == [8, 8]
    assert [rig.of(request, index).tokens for index in range(3)] == [expected_tokens(request, i) for i in range(3)]
    alone = Rig(prefix_caching=False)
    alone.add(prompt(10), n=3, max_tokens=2)
    alone.step()
    assert started(plan(alone, 1)) == [10, 10, 10]
    short = Rig()
    short.add(prompt(4), n=3, max_tokens=2)
    short.step()
    assert started(plan(short, 1)) == [4, 4, 4]


def test_waiting_siblings_let_others_pass() -> None:
    """Red when a request behind n siblings waits for their prompt."""
    rig = Rig(max_num_batched_tokens=20)
    rig.add(prompt(10), n=3, max_tokens=2)
    rig.add(prompt(7), max_tokens=2)
    rig.step()
    assert started(plan(rig, 1)) == [10, 7]
    rig.run()


def test_siblings_survive_their_leader() -> None:
    """Red when the sequences that wait for a prompt wait for ever after the one that computed it was aborted."""
    rig = Rig(max_num_batched_tokens=8)
    request = rig.add(prompt(20), n=3, max_tokens=2)
    rig.step()
    rig.engine.submit(Abort(1, (request.number,)), 0.0)
    rig.run()
    assert rig.of(request, 1).tokens == expected_tokens(request, 1)
    assert rig.of(request, 2).tokens == expected_tokens(request, 2)


def test_one_step_admits_so_many_tokens() -> None:
    """Red when cached prompts, which cost no budget, are admitted without end in one step."""
    rig = Rig(
        max_num_seqs=8, max_num_batched_tokens=64, page_size=16, max_model_len=8192, total_pages=4096, max_queue=64
    )
    long = prompt(7000)
    rig.add(long, max_tokens=1)
    rig.run()
    for _ in range(5):
        rig.add(long, max_tokens=1)
    rig.step()
    assert started(rig.worker.plans[-1]) == [7000, 7000]
    rig.run()


def test_row_sampling_carries_what_the_worker_needs() -> None:
    rig = Rig()
    rig.add(prompt(3), n=2, max_tokens=5, min_tokens=2, stop_token_ids=frozenset([7, 3]), ignore_eos=False, seed=11)
    rig.add(prompt(3), max_tokens=5, stop_token_ids=frozenset([7]), temperature=0.0, logit_bias={4: 1.5})
    rig.step()
    first, second, third = (start.sampling for start in plan(rig, 1).starts)
    assert ints(first.suppress) == [EOS, 3, 7]
    assert (first.min_tokens, first.seed) == (2, 11)
    assert second.seed not in (11, 12)
    assert (third.suppress, third.temperature, third.logit_bias) == (b"", 0.0, {4: 1.5})


def test_a_budget_below_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="token budget"):
        Rig(max_num_seqs=8, max_num_batched_tokens=7)
