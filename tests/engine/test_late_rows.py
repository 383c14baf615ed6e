"""Rows that the worker leaves out of a step: what the engine makes of them, and of the rows beside them."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from engine_core.request import FINISH_ABORT, FINISH_LENGTH, Abort, Request
from engine_core.scheduling.flight import ResultMismatch
from tests.engine.rig import Rig
from tests.engine.simulated_model import expected_tokens

PROMPT = [1, 2, 3, 4, 5, 6]


def run(rig: Rig, turns: int = 500) -> None:
    """To the end; late rows catch up as soon as the engine knows of them."""
    for _ in range(turns):
        if rig.engine.open_count == 0 and not rig.worker.busy:
            rig.step()
            return
        rig.turn()
        rig.worker.catch_up()
    raise AssertionError(f"{rig.engine.open_count} sequences are still open")


def check(rig: Rig, *requests: Request) -> None:
    for request in requests:
        seen = rig.of(request)
        assert seen.tokens == expected_tokens(request, 0)
        described = [-float(token) for token in seen.tokens if request.params.logprobs >= 0]
        assert [sampled for sampled, _, _ in seen.logprobs] == described
    rig.check_settled()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("late", [[True, False], [False, True, False, False], [True, True, False]])
def test_late_rows_draw_what_they_would_have(late: list[bool], depth: int, overlap: bool) -> None:
    """Red when a late row counts as advanced, is planned before it caught up, counts a token for it, or when logprobs
    go to another row of its step."""
    rig = Rig(async_depth=depth, overlap=overlap)
    rig.worker.late_draws = itertools.cycle(late)
    first = rig.add([8, *PROMPT], max_tokens=40, logprobs=1)
    rig.step()
    bound = [rig.add([seed, *PROMPT], grammar="a", max_tokens=12, logprobs=2) for seed in (9, 10)]
    rig.step()
    rig.compile()
    second = rig.add([11, *PROMPT], max_tokens=40, logprobs=1)
    run(rig)
    for request in bound:
        finish = rig.finish(request)
        assert (finish.reason, finish.prompt_tokens, finish.output_tokens) == (FINISH_LENGTH, 7, 12)
    check(rig, first, second, *bound)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_late_row_costs_the_others_no_step(depth: int) -> None:
    """Red when a plan is missing a row that follows no grammar, or is made for a late row alone."""
    rig = Rig(async_depth=depth)
    rig.worker.late_draws = itertools.chain([False, True], itertools.repeat(False))
    bound, free = rig.add(PROMPT, grammar="a", max_tokens=20), rig.add([8, *PROMPT], max_tokens=24)
    rig.step()
    rig.compile()
    while rig.of(free).finish is None:
        rig.turn()
    assert len(rig.of(free).tokens) == 24
    assert len(rig.of(bound).tokens) == 1
    plans = len(rig.worker.plans)
    for _ in range(5):
        rig.turn()
    assert len(rig.worker.plans) == plans, "an engine with nothing but a late row made steps"
    run(rig)
    check(rig, bound, free)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("late", [[True], [False, False, True]])
def test_a_late_row_may_be_aborted_and_its_slot_used(late: list[bool], overlap: bool) -> None:
    """Red when the slot's next row is held for it, or keeps its pages."""
    rig = Rig(max_num_seqs=1, async_depth=1, overlap=overlap)
    rig.worker.late_draws = itertools.chain(late, itertools.repeat(False))
    gone = rig.add(PROMPT, grammar="a", max_tokens=20)
    rig.step()
    rig.compile()
    for _ in range(5):
        rig.turn()
    rig.engine.submit(Abort(1, (gone.number,)), rig.now)
    following = rig.add(PROMPT, max_tokens=9)
    run(rig)
    assert rig.finish(gone).reason == FINISH_ABORT
    check(rig, following)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("late", [[True, False, False], [False, True, True, False, False]])
def test_late_rows_are_preempted_like_any_other(late: list[bool], depth: int) -> None:
    """Red when a late row keeps its pages, comes back held, or with a token that it never drew."""
    rig = Rig(total_pages=10, async_depth=depth, prefix_caching=False)
    rig.worker.late_draws = itertools.cycle(late)
    first = rig.add(PROMPT, grammar="a", max_tokens=24)
    last = rig.add([*PROMPT, 7], grammar="b", max_tokens=24)
    rig.step()
    rig.compile()
    run(rig)
    assert rig.engine.stats().preemptions >= 1
    check(rig, first, last)


@pytest.mark.parametrize("late", [[0], [7]])
def test_rows_that_werent_planned_cant_be_late(late: list[int]) -> None:
    """Red when a result that names them is believed: a row's position would go back."""
    rig = Rig()
    rig.add(PROMPT, max_tokens=9)
    rig.step()
    for _ in range(3):
        rig.turn()
    rig.worker.finish_all()
    (result,) = rig.worker.collect()
    rig.worker.hold([msgspec.structs.replace(result, late=late)])
    with pytest.raises(ResultMismatch, match=r"late rows|bytes of tokens"):
        rig.step()
