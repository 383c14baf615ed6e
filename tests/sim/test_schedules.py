"""Whole-system properties on the fake device: tokens, pages and endings under any schedule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.request import FINISH_ABORT, FINISH_LENGTH, Abort
from engine_core.step import Lane
from tests.sim.harness import Sim

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 20), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.just(("engine",)),
        st.just(("worker",)),
        st.tuples(st.just("run"), st.sampled_from(list(Lane)), st.integers(1, 4)),
    ),
    max_size=80,
)


def play(sim: Sim, moves: list[tuple[Any, ...]]) -> set[int]:
    """Make the moves, then let everything end; returns the aborted numbers."""
    aborted: set[int] = set()
    number = 0
    for move in moves:
        match move:
            case ("add", length, max_tokens, priority, family):
                number += 1
                sim.add(number, [(family * 31 + i) % 997 for i in range(length)], max_tokens, priority=priority)
            case ("abort", target):
                aborted.add(target)
                sim.engine.submit(Abort(1, (target,)), sim.now)
            case ("engine",):
                sim.step_engine()
            case ("worker",):
                sim.step_worker()
            case ("run", lane, count):
                sim.run_stream(lane, count)
        gauges = sim.scheduler.gauges()
        held = gauges.pages_free + gauges.pages_cached + gauges.pages_referenced + gauges.pages_retiring
        assert held == gauges.pages_total
    sim.settle()
    return aborted


@pytest.mark.parametrize("overlap", ["off", "stream", "green"])
@settings(max_examples=60, deadline=None)
@given(moves=MOVES, depth=st.integers(1, 3), pages=st.sampled_from([26, 40]), cache=st.booleans())
def test_any_schedule_gives_the_same_tokens_and_one_ending_each(
    overlap: str, moves: list[tuple[Any, ...]], depth: int, pages: int, cache: bool
) -> None:
    """L6, O8, O10 to O12, S5: one ending and the same tokens for everybody.

    Red when a lane, an abort, a preemption or the pipeline's depth changes a token, a page is given away before its
    fence (the vector clocks raise, the worker aborts), or a request ends twice or never.
    """
    sim = Sim(overlap=overlap, depth=depth, pages=pages, prefix_caching=cache)
    aborted = play(sim, moves)
    assert sim.abort_cause is None
    assert sim.engine_dead is None
    sim.check_tokens()
    assert set(sim.finishes) == set(sim.prompts)
    for number, finish in sim.finishes.items():
        assert finish.reason == FINISH_LENGTH or (finish.reason == FINISH_ABORT and number in aborted)
        assert finish.output_tokens == len(sim.tokens.get(number, []))
    gauges = sim.scheduler.gauges()
    assert (gauges.pages_referenced, gauges.running, gauges.waiting, gauges.prefills_in_flight) == (0, 0, 0, 0)
    assert gauges.pages_free + gauges.pages_cached == gauges.pages_total


@pytest.mark.parametrize("overlap", ["off", "green"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_stop_ids_found_late_discard_rows(overlap: str, depth: int) -> None:
    """Red when a late row behind a stop is published, or its page is reused before its write is proven."""
    sim = Sim(overlap=overlap, depth=depth)
    sim.prompts[1] = [5, 6, 7]
    drawn = sim.expected(1, 6)
    stop, end = drawn[5], drawn.index(drawn[5]) + 1
    sim.add(1, [5, 6, 7], 30, stop_token_ids=(stop,))
    sim.add(2, [9] * 10, 12)
    sim.settle()
    assert sim.tokens[1] == drawn[:end]
    assert sim.finishes[1].stop_token_id == stop
    sim.check_tokens()
    assert len(sim.tokens[2]) == 12
    assert sim.abort_cause is None
    assert sim.engine.stats().rows_discarded <= depth - 1
