"""Masks that aren't there when their row is planned: the row is left out, the others go on, and no token changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.step import Lane, StepPlan
from tests.sim.harness import Sim
from tests.sim.test_schedules import Life

REQUEST = (st.integers(1, 40), st.integers(1, 20), st.integers(0, 2), st.integers(0, 3), st.none() | st.integers(0, 19))
CONSTRAINED_MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("constrained"), *REQUEST, st.integers(1, 3)),
        st.tuples(st.just("add"), *REQUEST, st.integers(1, 2)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.just(("flush",)),
        st.just(("engine",)),
        st.just(("worker",)),
        st.just(("masks",)),
        st.tuples(st.just("run"), st.sampled_from(list(Lane)), st.integers(1, 4)),
    ),
    max_size=80,
)


@pytest.mark.parametrize("overlap", ["off", "green", "auto"])
@settings(max_examples=60, deadline=None)
@given(
    moves=CONSTRAINED_MOVES,
    depth=st.integers(1, 3),
    pages=st.sampled_from([26, 40]),
    cache=st.booleans(),
    in_time=st.lists(st.booleans(), min_size=1, max_size=7),
)
def test_late_masks_change_no_token(
    overlap: str, moves: list[tuple[Any, ...]], depth: int, pages: int, cache: bool, in_time: list[bool]
) -> None:
    """Red when a late row counts as advanced, draws, publishes what isn't computed, or is never planned again."""
    life = Life(Sim(overlap=overlap, depth=depth, pages=pages, prefix_caching=cache, in_time=in_time))
    for move in moves:
        life.move(move)
    life.sim.settle()
    life.check()


@pytest.mark.parametrize("overlap", ["off", "green"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_others_go_on_beside_a_late_row(overlap: str, depth: int) -> None:
    """Red when a row without a mask is planned again and again, or costs another row a step."""
    life = Life(Sim(overlap=overlap, depth=depth, in_time=[True, False]))
    sim = life.sim
    life.add(5, 30, 0, 1, None, 1)
    life.add(6, 8, 0, 2, None, 1, grammar=True)
    while not sim.ranks[0].masks.times_late:
        sim.turn()
    before, drawn = len(sim.executor.plans), len(sim.tokens[1])
    slot = _slot(sim, 2)
    for _ in range(12):
        sim.turn()
    since = sim.executor.plans[before + depth :]
    assert len(sim.tokens[1]) >= drawn + 12
    assert not any(slot in _decoded(plan) for plan in since)
    assert sim.ranks[0].masks.times_late == 1
    known = len(sim.tokens[2])
    sim.masks_arrive()
    for _ in range(4):
        sim.turn()
    assert len(sim.tokens[2]) > known
    sim.settle()
    life.check()


@pytest.mark.parametrize("overlap", ["off", "green"])
def test_an_engine_whose_only_row_is_late_rests(overlap: str) -> None:
    """Red when steps are spent on waiting, or the row isn't planned once its mask is there."""
    life = Life(Sim(overlap=overlap, in_time=[False]))
    sim = life.sim
    life.add(9, 3, 0, 1, None, 1, grammar=True)
    for _ in range(3):
        sim.turn()
    plans = len(sim.executor.plans)
    for _ in range(20):
        sim.turn()
    assert len(sim.executor.plans) == plans == 1
    assert sim.tokens == {}
    sim.settle()
    life.check()
    assert sim.ranks[0].masks.times_late == 3


def _slot(sim: Sim, number: int) -> int:
    sequence = sim.scheduler.sequences.find(1, number)
    assert sequence is not None
    return sequence.slot


def _decoded(plan: StepPlan) -> list[int]:
    slots: list[int] = np.frombuffer(plan.decode_slots, "<i4").tolist()
    return slots


def test_a_page_that_is_written_again_stays_private() -> None:
    """Red when the chunk of a late row publishes the page of its last position: shared pages aren't written."""
    sim = Sim(in_time=[False])
    sim.add(1, [*range(8)], 3, grammar=True)
    for _ in range(3):
        sim.turn()
    sequence = sim.scheduler.sequences.find(1, 1)
    assert sequence is not None
    assert sequence.published == 1
    sim.settle()
    assert sequence.published == 2
    sim.check_tokens()


def test_a_step_of_late_rows_alone_is_answered_beside_a_prefill() -> None:
    """Red when such a step is taken for one that asks for the prefill: at depth 1 nothing else could be planned."""
    sim = Sim(overlap="green", depth=1, in_time=[True, True, True, False])
    sim.add(1, [5, 6], 20, grammar=True)
    while len(sim.tokens.get(1, [])) < 1:
        sim.turn()
    sim.add(2, [*range(20)], 2)
    while not sim.ranks[0].masks.times_late:
        sim.turn(prefill=0)
    for _ in range(3):
        sim.turn(prefill=0)
    assert sim.scheduler.in_flight.batch is not None
    assert sim.scheduler.in_flight.working == 0
    sim.settle()
    sim.check_tokens()
