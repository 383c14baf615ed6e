"""How requests come and go: admission, aborts, sessions, deadlines, draining, statistics."""

from __future__ import annotations

import pytest

from engine_core.engine import DRAIN_RETRY_S
from engine_core.errors import RejectReason, StatusCode
from engine_core.request import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_REJECTED,
    Abort,
    CloseSession,
    FinishError,
    FlushCache,
    Request,
)
from tests.engine.rig import Rig
from tests.engine.simulated_model import expected_tokens

PROMPT = [1, 2, 3, 4, 5, 6]


def error_of(rig: Rig, request: Request, index: int = 0) -> FinishError:
    error = rig.finish(request, index).error
    assert error is not None
    return error


# ------------------------------ admission


def test_accepted_and_started_are_told() -> None:
    rig = Rig(max_num_seqs=1)
    first, second = rig.add(PROMPT, max_tokens=2), rig.add(PROMPT, session=2, n=2, max_tokens=2)
    rig.step()
    assert rig.accepted == [(1, first.number), (2, second.number)]
    assert rig.of(first).cached == 0
    assert rig.of(second).cached is None
    rig.run()
    rig.check_settled()


def test_a_request_that_can_never_fit_is_refused() -> None:
    """Case 14. Red when it is queued to be retried for ever, or when one that just fits is refused."""
    rig = Rig(total_pages=5, page_size=4)
    too_long, fits = rig.add(PROMPT, max_tokens=15), rig.add(PROMPT, max_tokens=14)
    rig.run()
    error = error_of(rig, too_long)
    assert (rig.finish(too_long).reason, error.reject_reason) == (FINISH_REJECTED, RejectReason.NEVER_FITS)
    assert (error.code, error.parameter) == (StatusCode.INVALID_ARGUMENT, "max_tokens")
    assert "need 6 pages" in error.message
    assert "has 5" in error.message
    assert rig.of(fits).tokens == expected_tokens(fits, 0)


def test_the_queue_is_bounded_and_says_when_to_retry() -> None:
    """Case 18. Red when a burst grows the queue, the check and the reservation come apart, or an idle server refuses
    what it has a row for because it comes together with what fills the queue."""
    rig = Rig(max_num_seqs=1, max_queue=3)
    requests = [rig.add(PROMPT, max_tokens=1) for _ in range(6)]
    rig.step()
    for refused in requests[4:]:
        error = error_of(rig, refused)
        assert (error.code, error.reject_reason) == (StatusCode.RESOURCE_EXHAUSTED, RejectReason.QUEUE_FULL)
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0
    rig.run()
    assert [rig.finish(request).reason for request in requests[:4]] == [FINISH_LENGTH] * 4
    assert rig.engine.stats().sequences_rejected == 2


def test_n_sequences_enter_together_or_not_at_all() -> None:
    """Case 5. Red when some children of a request are queued and the others refused."""
    rig = Rig(max_num_seqs=1, max_queue=3)
    rig.add(PROMPT, max_tokens=1)
    rig.add(PROMPT, max_tokens=1)
    refused = rig.add(PROMPT, n=3, max_tokens=1)
    accepted = rig.add(PROMPT, n=2, max_tokens=1)
    rig.step()
    assert [rig.finish(refused, index).reason for index in range(3)] == [FINISH_REJECTED] * 3
    assert rig.engine.stats().sequences_accepted == 4
    rig.run()
    assert [rig.finish(accepted, index).reason for index in range(2)] == [FINISH_LENGTH] * 2


def test_more_sequences_than_the_queue_holds_never_fit() -> None:
    """Red when a client is told to retry what can't succeed."""
    rig = Rig(max_queue=2)
    request = rig.add(PROMPT, n=3, max_tokens=1)
    rig.step()
    error = error_of(rig, request)
    assert (error.reject_reason, error.retry_after_s) == (RejectReason.NEVER_FITS, None)


def test_preempted_sequences_come_back_to_a_full_queue() -> None:
    """Red when an accepted sequence is lost because the queue has filled up while it ran."""
    rig = Rig(max_num_seqs=2, total_pages=8, max_queue=2, prefix_caching=False)
    running = [rig.add(PROMPT, max_tokens=22) for _ in range(2)]
    rig.step()
    waiting = [rig.add(PROMPT, max_tokens=22) for _ in range(2)]
    rig.run()
    assert rig.engine.stats().preemptions > 0
    for request in running + waiting:
        assert rig.of(request).tokens == expected_tokens(request, 0)


def test_equal_numbers_of_two_sessions_are_two_requests() -> None:
    """Case 2. Red when sequences are known by the client's own numbers or labels."""
    rig = Rig()
    mine, theirs = rig.add(PROMPT, session=1, seed=1), rig.add(PROMPT, session=2, seed=2)
    assert mine.number == theirs.number
    rig.step()
    rig.engine.submit(Abort(1, (mine.number,)), 0.0)
    rig.run()
    assert rig.finish(mine).reason == FINISH_ABORT
    assert rig.of(theirs).tokens == expected_tokens(theirs, 0)


# ------------------------------ aborts


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_aborted_sequence_is_in_no_later_plan(depth: int) -> None:
    """Case 1. Red when decoding runs on after the abort, or its pages come back before its last step."""
    rig = Rig(async_depth=depth, prefix_caching=False)
    request = rig.add(PROMPT, max_tokens=40)
    rig.step()
    rig.turn()
    plans, tokens = len(rig.worker.plans), len(rig.of(request).tokens)
    rig.engine.submit(Abort(1, (request.number,)), 0.0)
    rig.step()
    assert rig.finish(request).reason == FINISH_ABORT
    assert rig.finish(request).output_tokens == tokens
    assert len(rig.worker.plans) == plans
    stats = rig.engine.stats()
    assert (stats.running, stats.pages_free == stats.pages_total) == (0, False)
    assert stats.pages_retiring > 0
    rig.turn()
    assert rig.engine.stats().pages_free == stats.pages_total
    assert len(rig.of(request).tokens) == tokens
    rig.check_settled()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_slot_is_given_again_after_its_last_step(depth: int) -> None:
    """Rules O10, O12. Red when a slot whose step is in flight is handed to the next sequence."""
    rig = Rig(async_depth=depth, max_num_seqs=1)
    request, waiting = rig.add(PROMPT, max_tokens=40), rig.add(PROMPT, max_tokens=2)
    rig.step()
    rig.engine.submit(Abort(1, (request.number,)), 0.0)
    for _ in range(depth):
        rig.step()
        assert rig.of(waiting).cached is None
        rig.worker.finish_step()
    rig.step()
    assert rig.of(waiting).cached is not None
    rig.run()


def test_a_prompt_aborted_in_flight_is_not_found_before_it_is_computed() -> None:
    """Rule O8. Red when closing a row publishes pages whose only chunk is still in flight."""
    rig = Rig(async_depth=2)
    aborted = rig.add([5] * 12, max_tokens=9)
    rig.step()
    rig.engine.submit(Abort(1, (aborted.number,)), 0.0)
    again = rig.add([5] * 12, max_tokens=2)
    rig.worker.finish_step()
    rig.step()
    rig.run()
    assert rig.of(again).tokens == expected_tokens(again, 0)
    early = Rig(async_depth=3)
    aborted = early.add([5] * 12, max_tokens=1)
    early.step()
    early.engine.submit(Abort(1, (aborted.number,)), 0.0)
    again = early.add([5] * 12, max_tokens=2)
    early.step()
    assert early.of(again).cached == 0
    early.run()


def test_aborting_is_idempotent_and_ignores_strangers() -> None:
    """Case 3. Red when an unknown, finished or repeated number raises or ends somebody else."""
    rig = Rig()
    done, live = rig.add(PROMPT, max_tokens=1), rig.add(PROMPT, max_tokens=30)
    rig.turn()
    rig.turn()
    rig.engine.submit(Abort(1, (done.number, live.number, live.number, 999)), 0.0)
    rig.engine.submit(Abort(7, (live.number,)), 0.0)
    rig.run()
    assert (rig.finish(done).reason, rig.finish(live).reason) == (FINISH_LENGTH, FINISH_ABORT)
    rig.check_settled()


def test_one_sibling_can_be_aborted() -> None:
    rig = Rig()
    request = rig.add(PROMPT, n=3, max_tokens=6)
    rig.step()
    rig.engine.submit(Abort(1, (request.number + 1,)), 0.0)
    rig.run()
    assert [rig.finish(request, index).reason for index in range(3)] == [FINISH_LENGTH, FINISH_ABORT, FINISH_LENGTH]


def test_a_waiting_sequence_is_aborted_where_it_stands() -> None:
    """Red when the queue keeps counting it: the place of a closed sequence must be free again."""
    rig = Rig(max_num_seqs=1, max_queue=2)
    first = rig.add(PROMPT, max_tokens=3)
    rig.step()
    waiting = [rig.add(PROMPT, max_tokens=3) for _ in range(2)]
    rig.engine.submit(Abort(1, tuple(request.number for request in waiting)), 0.0)
    again = [rig.add(PROMPT, max_tokens=3) for _ in range(2)]
    rig.run()
    for request in (first, *again):
        assert rig.of(request).tokens == expected_tokens(request, 0)
    rig.check_settled()


def test_gauges_are_fresh_without_a_step() -> None:
    """Case 29. Red when cancelling everything leaves the gauges as the last step saw them."""
    rig = Rig()
    requests = [rig.add(PROMPT, max_tokens=30) for _ in range(3)]
    rig.turn()
    rig.worker.finish_all()
    rig.engine.submit(Abort(1, tuple(request.number for request in requests)), 0.0)
    stats = rig.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_referenced) == (0, 0, 0)
    assert stats.finished_abort == 3
    assert rig.engine.open_count == 0


# ------------------------------ sessions, deadlines


def test_a_closed_session_gets_nothing_more() -> None:
    """Red when a session that is gone is published to, or its sequences run on, or others suffer."""
    rig = Rig()
    gone, stays = rig.add(PROMPT, session=1, n=2, max_tokens=30), rig.add(PROMPT, session=2, max_tokens=5)
    rig.turn()
    rig.worker.finish_all()
    rig.add(PROMPT, session=1, max_tokens=5)
    rig.engine.submit(CloseSession(1), 0.0)
    published = len(rig.published)
    rig.run()
    assert all(output.session == 2 for outputs in rig.published[published:] for output in outputs)
    assert rig.of(gone).finish is None
    assert rig.of(stays).tokens == expected_tokens(stays, 0)
    assert rig.engine.stats().finished_abort == 3
    rig.check_settled()


def test_deadlines_end_running_and_waiting_sequences() -> None:
    """Red when a deadline is noticed late, reported as an abort, or forgotten while waiting."""
    rig = Rig(max_num_seqs=1)
    running = rig.add(PROMPT, max_tokens=50, deadline=5.0)
    waiting = rig.add(PROMPT, max_tokens=5, deadline=6.0, n=2)
    patient = rig.add(PROMPT, max_tokens=5, deadline=100.0)
    rig.step()
    assert rig.engine.next_wakeup(1.0) == 5.0
    rig.now = 4.9
    rig.turn()
    assert rig.of(running).finish is None
    rig.now = 5.0
    rig.step()
    error = error_of(rig, running)
    assert (rig.finish(running).reason, error.code) == (FINISH_ERROR, StatusCode.DEADLINE_EXCEEDED)
    assert rig.engine.next_wakeup(5.0) == 6.0
    assert rig.engine.next_wakeup(7.0) == 7.0
    rig.now = 6.5
    rig.step()
    assert error_of(rig, waiting, 1).code is StatusCode.DEADLINE_EXCEEDED
    rig.run()
    assert rig.of(patient).tokens == expected_tokens(patient, 0)
    assert rig.engine.next_wakeup(7.0) is None
    rig.check_settled()


def test_a_request_that_comes_too_late_holds_no_place() -> None:
    rig = Rig(max_queue=1)
    rig.now = 10.0
    late = rig.add(PROMPT, deadline=9.0)
    assert rig.engine.open_count == 0
    in_time = rig.add(PROMPT, deadline=90.0, max_tokens=2)
    rig.run()
    assert error_of(rig, late).code is StatusCode.DEADLINE_EXCEEDED
    assert rig.finish(in_time).reason == FINISH_LENGTH


def test_finished_requests_don_t_linger_behind_their_deadlines() -> None:
    """Red when every request of the last hour is kept because its deadline is still to come."""
    rig = Rig()
    for _ in range(300):
        rig.add([1], max_tokens=1, deadline=1e6)
        rig.run()
    assert len(rig.scheduler._deadlines._heap) < 80


# ------------------------------ draining, cache


def test_draining_finishes_what_is_open_and_refuses_the_rest() -> None:
    """Red when a drain cuts off what is open, takes something new, or doesn't say when to come again."""
    rig = Rig()
    before = rig.add(PROMPT, max_tokens=4)
    rig.engine.drain()
    after = rig.add(PROMPT, max_tokens=4, n=2)
    rig.run()
    assert rig.of(before).tokens == expected_tokens(before, 0)
    error = error_of(rig, after, 1)
    assert (error.code, error.reject_reason) == (StatusCode.UNAVAILABLE, RejectReason.DRAINING)
    assert error.retry_after_s == DRAIN_RETRY_S


def test_a_drain_s_end_aborts_with_unavailable_at_once() -> None:
    """Red when the last words wait for a step that nobody takes any more."""
    rig = Rig()
    requests = [rig.add(PROMPT, max_tokens=40), rig.add(PROMPT, session=2, n=2, max_tokens=40)]
    rig.turn()
    rig.engine.drain()
    rig.engine.abort_all("drained for 30 s")
    for request in requests:
        error = error_of(rig, request)
        assert (error.code, error.message) == (StatusCode.UNAVAILABLE, "drained for 30 s")
    assert rig.engine.open_count == 0
    rig.turn()
    rig.check_settled()


def test_flushing_drops_unreferenced_pages_only() -> None:
    rig = Rig()
    rig.add(PROMPT * 2, max_tokens=2)
    rig.run()
    held = rig.add([7] * 9, max_tokens=30)
    rig.turn()
    assert rig.engine.stats().pages_cached == 3
    rig.engine.submit(FlushCache(), 0.0)
    assert rig.engine.stats().pages_cached == 0
    rig.run()
    assert rig.of(held).tokens == expected_tokens(held, 0)


def test_counters_of_tokens_and_pages() -> None:
    """Red when cached tokens count twice, a preempted prompt counts again, or lookups aren't counted in pages."""
    rig = Rig()
    rig.add([1] * 10, max_tokens=3)
    rig.run()
    rig.add([1] * 10, max_tokens=3)
    rig.run()
    stats = rig.engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (20, 8, 6)
    assert (stats.prefix_queries, stats.prefix_hits) == (4, 2)
    assert (stats.prefill_launches, stats.prefill_completions) == (2, 2)


def test_time_in_the_queue_ends_with_the_first_prefill() -> None:
    """Red when a sequence's wait isn't counted from its admission to its first chunk, or is counted again later."""
    rig = Rig(max_num_seqs=1)
    rig.add(PROMPT, max_tokens=3)
    rig.step()
    rig.add(PROMPT, max_tokens=1)
    rig.now += 2.0
    assert rig.engine.stats().sequences_started == 1
    rig.run()
    stats = rig.engine.stats()
    assert (stats.sequences_started, stats.queue_wait_us) == (2, 2_000_000)


def test_steps_count_by_kind() -> None:
    """Red when a step is counted under another kind than what its forward computed."""
    rig = Rig(async_depth=1)
    rig.add(PROMPT, max_tokens=3)
    rig.run()
    stats = rig.engine.stats()
    assert (stats.steps_prefill, stats.steps_decode, stats.steps_mixed, stats.steps_empty) == (1, 2, 0, 0)
    first = rig.add(PROMPT, max_tokens=5)
    rig.worker.finish_step()
    rig.step()
    rig.add(PROMPT, max_tokens=2)
    rig.run()
    stats = rig.engine.stats()
    assert (stats.steps_prefill, stats.steps_mixed, stats.steps_empty) == (2, 1, 0)
    assert len(rig.of(first).tokens) == 5


def test_nothing_is_published_when_nothing_happens() -> None:
    rig = Rig()
    rig.add(PROMPT, max_tokens=1)
    rig.run()
    published = len(rig.published)
    for _ in range(3):
        rig.step()
    assert len(rig.published) == published
    assert len(rig.worker.plans) == 1
