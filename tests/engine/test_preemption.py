"""Pages run short: who waits, who is preempted, and that everybody gets on with the tokens they had."""

from __future__ import annotations

import pytest

from engine_core.request import FINISH_LENGTH, Abort, Request
from tests.engine.rig import Rig
from tests.engine.simulated_model import expected_tokens

PROMPT = [1, 2, 3, 4, 5, 6]


def starts_of(rig: Rig, request: Request) -> list[int]:
    """Ids known at each start of a request's only sequence, told apart by its prompt's length."""
    length = len(request.ids)
    return [len(row.ids) // 4 for step in rig.worker.plans for row in step.starts if row.prompt_len == length]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_last_in_order_is_preempted_and_resumes_where_it_was(depth: int, prefix_caching: bool) -> None:
    """Red when the first in order is preempted, or a drawn token is drawn (or published) again after the resumption."""
    rig = Rig(total_pages=10, async_depth=depth, prefix_caching=prefix_caching)
    first, last = rig.add(PROMPT, max_tokens=24), rig.add([*PROMPT, 7], max_tokens=24)
    rig.run()
    assert starts_of(rig, first) == [6]
    resumed = starts_of(rig, last)
    assert len(resumed) >= 2
    assert resumed == sorted(resumed)
    for request in (first, last):
        assert rig.of(request).tokens == expected_tokens(request, 0)
        assert rig.finish(request).prompt_tokens == len(request.ids)
    assert rig.engine.stats().preemptions == len(resumed) - 1
    assert rig.engine.stats().prompt_tokens == 13
    rig.check_settled()


def test_priority_decides_who_goes() -> None:
    """Red when arrival alone picks the victim: the urgent latecomer would be preempted for the first."""
    rig = Rig(total_pages=10, prefix_caching=False)
    lazy = rig.add(PROMPT, max_tokens=24, priority=1)
    rig.turn()
    urgent = rig.add([*PROMPT, 7], max_tokens=24, priority=-1)
    rig.run()
    assert len(starts_of(rig, urgent)) == 1
    assert len(starts_of(rig, lazy)) == 2
    assert rig.of(lazy).tokens == expected_tokens(lazy, 0)


def test_a_row_waits_for_retiring_pages_rather_than_preempt() -> None:
    """Red when pages that are on their way back cost somebody a recomputation."""
    rig = Rig(total_pages=10, async_depth=2, prefix_caching=False)
    rows = [rig.add(PROMPT, max_tokens=9), rig.add(PROMPT, max_tokens=9)]
    aborted = rig.add([9] * 9, max_tokens=15)
    rig.step()
    while len(rig.worker.plans) < 7:
        rig.worker.finish_step()
        rig.step()
    rig.worker.finish_step()
    rig.engine.submit(Abort(1, (aborted.number,)), 0.0)
    rig.step()
    stats = rig.engine.stats()
    assert (stats.pages_free, stats.pages_retiring, stats.preemptions) == (0, 4, 0)
    assert len(rig.worker.plans) == 7, "both rows need a page, and wait for one"
    rig.run()
    assert rig.engine.stats().preemptions == 0
    for request in rows:
        assert rig.of(request).tokens == expected_tokens(request, 0)


def test_newcomers_leave_room_for_running_rows_to_grow() -> None:
    """Red when a newcomer takes the last page and is preempted with the next token of somebody else."""
    rig = Rig(total_pages=7, prefix_caching=False)
    rig.add([1] * 8, max_tokens=10)
    rig.step()
    rig.turn()
    newcomer = rig.add([2] * 15, max_tokens=6)
    rig.turn()
    assert rig.engine.stats().pages_free == 4, "just what the newcomer's prompt needs"
    rig.run()
    assert rig.engine.stats().preemptions == 0
    assert rig.finish(newcomer).reason == FINISH_LENGTH


def test_everybody_gets_on_when_nobody_fits_beside_another() -> None:
    """Red when two sequences that need the whole cache preempt one another for ever."""
    rig = Rig(total_pages=8, max_num_batched_tokens=8, async_depth=2)
    requests = [rig.add([*PROMPT, index], max_tokens=25, seed=index) for index in range(5)]
    rig.run()
    for request in requests:
        assert rig.of(request).tokens == expected_tokens(request, 0)
    rig.check_settled()


def test_tokens_in_flight_at_a_preemption_are_published_once() -> None:
    """Red when the rows that were in flight at the preemption are dropped or drawn again (rule O12)."""
    rig = Rig(total_pages=8, async_depth=3, prefix_caching=False)
    requests = [rig.add([*PROMPT[: 4 + index]], max_tokens=20, seed=index) for index in range(3)]
    rig.step()
    while rig.engine.open_count:
        rig.worker.finish_step()
        rig.step()
    assert rig.engine.stats().preemptions > 0
    assert rig.engine.stats().rows_discarded == 0
    for request in requests:
        assert rig.of(request).tokens == expected_tokens(request, 0)


def test_an_abort_of_a_preempted_sequence_settles() -> None:
    """Red when a parked sequence (preempted, tokens still in flight) can't be ended."""
    rig = Rig(total_pages=8, async_depth=2, prefix_caching=False)
    requests = [rig.add(PROMPT, max_tokens=20, seed=index) for index in range(2)]
    rig.step()
    while rig.scheduler.sequences.parked == 0:
        rig.worker.finish_step()
        rig.step()
    rig.engine.submit(Abort(1, (requests[1].number,)), 0.0)
    rig.run()
    assert rig.of(requests[0]).tokens == expected_tokens(requests[0], 0)
    rig.check_settled()


def test_prompt_logprobs_aren_t_repeated_after_a_preemption() -> None:
    """Red when a preempted prefill describes the same prompt tokens twice, or skips some by a prefix hit."""
    rig = Rig(total_pages=10, max_num_batched_tokens=4, max_num_seqs=2)
    rig.add([1] * 6, max_tokens=30)
    described = rig.add([2 + index for index in range(28)], max_tokens=4, prompt_logprobs=0)
    rig.run()
    assert rig.engine.stats().preemptions == 1
    assert len(starts_of(rig, described)) > 1
    assert rig.of(described).tokens == expected_tokens(described, 0)
    starts = [(stretch.start, len(stretch.logprobs) // 4) for stretch in rig.of(described).prompt]
    assert [start for start, _ in starts] == [1 + sum(n for _, n in starts[:i]) for i in range(len(starts))]
    assert sum(count for _, count in starts) == 27


@pytest.mark.parametrize("length", [3, 4])
def test_late_tokens_of_a_preempted_row_publish_nothing(length: int) -> None:
    """Red when a row that gave its pages back publishes one of them with a token that was still in flight."""
    rig = Rig(page_size=1, total_pages=18, async_depth=3, max_num_seqs=2)
    requests = [rig.add([5] * 4, max_tokens=13), rig.add([6] * length, max_tokens=12)]
    rig.step()
    while rig.engine.open_count:
        rig.worker.finish_step()
        rig.step()
    assert rig.engine.stats().preemptions > 0
    for request in requests:
        assert rig.of(request).tokens == expected_tokens(request, 0)
    rig.check_settled()
