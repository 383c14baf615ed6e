"""Requests that follow a grammar: when they are accepted, when their rows are planned, and whom they keep waiting."""

from __future__ import annotations

import pytest

from engine_core.errors import RejectReason, StatusCode
from engine_core.request import FINISH_ABORT, FINISH_ERROR, FINISH_STOP, Abort
from engine_core.scheduling.grammars import MAX_AHEAD
from tests.engine.rig import Rig
from tests.engine.simulated_model import EOS, expected_tokens

PROMPT = [1, 2, 3, 4, 5, 6]


def test_accepted_once_the_grammar_is_compiled() -> None:
    """Red when a client hears of its place before the grammar is known to be good, or the row starts before."""
    rig = Rig()
    request = rig.add(PROMPT, grammar="a", max_tokens=5)
    rig.step()
    rig.step()
    assert rig.accepted == []
    assert rig.worker.plans == []
    assert rig.engine.stats().waiting == 1
    rig.compile()
    assert rig.accepted == [(1, request.number)]
    rig.run()
    assert rig.of(request).tokens == expected_tokens(request, 0)
    rig.step()
    assert rig.worker.asked == {}
    rig.check_settled()


def test_a_bad_grammar_fails_its_request_alone() -> None:
    """Red when a refusal of the worker reaches another request, or isn't blamed on the grammar."""
    rig = Rig()
    bad = rig.add(PROMPT, grammar="bad", n=2)
    good, free = rig.add(PROMPT, grammar="good", max_tokens=6), rig.add(PROMPT, max_tokens=6)
    rig.step()
    rig.compile(bad="unknown name")
    rig.run()
    for index in (0, 1):
        error = rig.finish(bad, index).error
        assert error is not None
        assert (error.code, error.reject_reason) == (StatusCode.INVALID_ARGUMENT, RejectReason.GRAMMAR)
        assert (error.parameter, error.message) == ("grammar", "the grammar: unknown name")
    assert (1, bad.number) not in rig.accepted
    for request in (good, free):
        assert rig.of(request).tokens == expected_tokens(request, 0)
    assert rig.worker.asked == {}
    rig.check_settled()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_skip_steps_until_their_token_is_back(depth: int, overlap: bool) -> None:
    """Red when a constrained row is planned before its last token is applied (the simulated worker raises),
    or tokens change with the depth."""
    rig = Rig(async_depth=depth, overlap=overlap)
    bound = [rig.add(PROMPT, grammar="a", max_tokens=20, n=2), rig.add([7, *PROMPT], grammar="b", max_tokens=9)]
    free = rig.add([8, *PROMPT], max_tokens=20)
    rig.step()
    rig.compile()
    rig.run()
    for request in (*bound, free):
        for index in range(request.params.n):
            assert rig.of(request, index).tokens == expected_tokens(request, index)
    rig.check_settled()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_beside_constrained_ones_is_in_every_plan(depth: int) -> None:
    """Red when rows that follow no grammar wait for those that do."""
    rig = Rig(async_depth=depth)
    rig.add(PROMPT, grammar="a", max_tokens=40)
    rig.add([8, *PROMPT], max_tokens=40)
    rig.step()
    rig.compile()
    for _ in range(6):
        rig.turn()
    steady = rig.worker.plans[-6:]
    free = rig.scheduler.sequences.find(1, 2)
    assert free is not None
    assert all(free.slot in list(memoryview(plan.decode_slots).cast("i")) for plan in steady)
    assert depth == 1 or any(len(plan.decode_slots) == 4 for plan in steady)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempted_rows_resume_with_what_they_drew(depth: int) -> None:
    """Red when a constrained row comes back without its key or its output, or draws a token again."""
    rig = Rig(total_pages=10, async_depth=depth, prefix_caching=False)
    first = rig.add(PROMPT, grammar="a", max_tokens=24)
    last = rig.add([*PROMPT, 7], grammar="b", max_tokens=24)
    rig.step()
    rig.compile()
    rig.run()
    assert rig.engine.stats().preemptions >= 1
    starts = [row for plan in rig.worker.plans for row in plan.starts if row.prompt_len == 7]
    assert len({row.grammar for row in starts}) == 1
    assert len(starts[-1].ids) > 4 * 7
    for request in (first, last):
        assert rig.of(request).tokens == expected_tokens(request, 0)
    rig.check_settled()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_allows_nothing_ends_its_row(depth: int) -> None:
    """Red when a row that the worker refuses publishes the token of that step, or takes others with it."""
    rig = Rig(async_depth=depth)
    stuck, free = rig.add(PROMPT, grammar="a", max_tokens=30), rig.add([8, *PROMPT], max_tokens=12)
    rig.step()
    rig.compile()
    for _ in range(4):
        rig.turn()
    sequence = rig.scheduler.sequences.find(1, stuck.number)
    assert sequence is not None
    known = len(rig.of(stuck).tokens)
    rig.worker.refuse_slots[sequence.slot] = "too complex"
    rig.turn()
    finish = rig.finish(stuck)
    assert finish.error is not None
    assert (finish.reason, finish.error.code) == (FINISH_ERROR, StatusCode.INVALID_ARGUMENT)
    assert rig.of(stuck).tokens == expected_tokens(stuck, 0)[:known]
    rig.run()
    assert rig.of(free).tokens == expected_tokens(free, 0)
    rig.check_settled()


def test_abort_while_the_grammar_is_compiled() -> None:
    """Red when a late outcome revives a sequence, or the worker keeps a grammar that nobody needs."""
    rig = Rig()
    gone = rig.add(PROMPT, grammar="a")
    rig.step()
    assert len(rig.worker.asked) == 1
    key = next(iter(rig.worker.asked))
    rig.engine.submit(Abort(1, (gone.number,)), rig.now)
    rig.step()
    assert rig.finish(gone).reason == FINISH_ABORT
    assert rig.worker.asked == {}
    rig.worker.asked[key] = gone.grammar  # type: ignore[assignment]
    rig.compile()
    assert rig.worker.plans == []
    rig.check_settled()


def test_few_grammars_are_compiled_ahead() -> None:
    """Red when a queue of requests has the worker hold a compiled grammar for each, or some are never asked for."""
    rig = Rig(max_queue=200)
    requests = [rig.add(PROMPT, grammar=f"g{i}", max_tokens=2) for i in range(2 * MAX_AHEAD)]
    rig.step()
    assert len(rig.worker.asked) == MAX_AHEAD
    rig.compile()
    rig.step()
    assert rig.engine.stats().running == 8
    assert len(rig.worker.asked) == MAX_AHEAD + 8
    for _ in range(200):
        rig.compile()
        rig.turn()
        assert len(rig.worker.asked) <= MAX_AHEAD + 8
    for request in requests:
        assert rig.of(request).tokens == expected_tokens(request, 0)
    rig.check_settled()


def test_eos_ends_a_constrained_row_that_ignores_eos() -> None:
    """Red when ignore_eos keeps a row going behind its grammar's end, where it could draw eos alone."""
    rig = Rig()
    requests = [rig.add([seed, *PROMPT], grammar="a", ignore_eos=True, max_tokens=60) for seed in range(10, 17)]
    rig.step()
    rig.compile()
    rig.run()
    ended = [request for request in requests if rig.finish(request).reason == FINISH_STOP]
    assert ended
    assert all(rig.of(request).tokens[-1] == EOS for request in ended)
    rig.check_settled()
