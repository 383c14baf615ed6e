"""Whole-system properties on the fake device: tokens, pages and endings under any schedule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.request import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Abort, FlushCache
from engine_core.step import Lane
from tests.sim.harness import EOS, NOW, Sim, uncontended

MOVES = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 40),
            st.integers(1, 20),
            st.integers(0, 2),
            st.integers(0, 3),
            st.none() | st.integers(0, 19),
            st.integers(1, 3),
        ),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.just(("flush",)),
        st.just(("engine",)),
        st.just(("worker",)),
        st.tuples(st.just("run"), st.sampled_from(list(Lane)), st.integers(1, 4)),
    ),
    max_size=80,
)


class Life:
    """A simulation, and what each of its sequences must draw if nobody aborts it."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.due: dict[int, tuple[int, ...]] = {}
        self.aborted: set[int] = set()
        self._numbers = 0

    def move(self, move: tuple[Any, ...]) -> None:
        match move:
            case ("add", length, max_tokens, priority, family, stop_at, n):
                self.add(length, max_tokens, priority, family, stop_at, n)
            case ("constrained", length, max_tokens, priority, family, stop_at, n):
                self.add(length, max_tokens, priority, family, stop_at, n, grammar=True)
            case ("masks",):
                self.sim.masks_arrive()
            case ("abort", target):
                self.aborted.add(target)
                self.sim.engine.submit(Abort(1, (target,)), NOW)
            case ("flush",):
                self.sim.engine.submit(FlushCache(), NOW)
            case ("engine",):
                self.sim.step_engine()
            case ("worker",):
                self.sim.step_worker()
            case ("run", lane, count):
                self.sim.run_stream(lane, count)
        gauges = self.sim.scheduler.gauges()
        held = gauges.pages_free + gauges.pages_cached + gauges.pages_referenced + gauges.pages_retiring
        assert held == gauges.pages_total

    def add(
        self,
        length: int,
        max_tokens: int,
        priority: int,
        family: int,
        stop_at: int | None,
        n: int,
        *,
        grammar: bool = False,
    ) -> None:
        """Prompts of one family begin alike. `stop_at` makes the token drawn there a stop id."""
        prompt = [(family * 31 + i) % 997 for i in range(length)]
        drawn = uncontended(tuple(prompt), max_tokens)
        stops = () if stop_at is None or stop_at >= max_tokens else (drawn[stop_at],)
        ends = stops + ((EOS,) if grammar else ())
        end = next((at + 1 for at, token in enumerate(drawn) if token in ends), max_tokens)
        for number in range(self._numbers + 1, self._numbers + n + 1):
            self.due[number] = drawn[:end]
        options: dict[str, Any] = {"priority": priority, "stop_token_ids": stops, "n": n, "grammar": grammar}
        self.sim.add(self._numbers + 1, prompt, max_tokens, **options)
        self._numbers += n

    def check(self) -> None:
        """Everybody has one ending and the tokens due, and everything that was held is back."""
        sim = self.sim
        assert sim.aborted is None
        assert sim.engine_dead is None
        sim.check_tokens()
        assert set(sim.finishes) == set(self.due)
        for number, finish in sim.finishes.items():
            tokens = tuple(sim.tokens.get(number, ()))
            assert finish.output_tokens == len(tokens)
            if finish.reason == FINISH_ABORT:
                assert number in self.aborted
                continue
            assert tokens == self.due[number]
            assert finish.reason == (FINISH_LENGTH if finish.stop_token_id is None else FINISH_STOP)
        gauges = sim.scheduler.gauges()
        assert (gauges.pages_referenced, gauges.running, gauges.waiting, gauges.prefills_in_flight) == (0, 0, 0, 0)
        assert gauges.pages_free + gauges.pages_cached == gauges.pages_total


@pytest.mark.parametrize("overlap", ["off", "stream", "green", "auto"])
@settings(max_examples=60, deadline=None)
@given(moves=MOVES, depth=st.integers(1, 3), pages=st.sampled_from([26, 40]), cache=st.booleans())
def test_any_schedule_gives_the_same_tokens_and_one_ending_each(
    overlap: str, moves: list[tuple[Any, ...]], depth: int, pages: int, cache: bool
) -> None:
    """L6, O8, O10 to O12, S5: one ending and the same tokens for everybody.

    Red when a lane, an abort, a preemption, a late stop or the pipeline's depth changes a token, a page is given away
    before its fence (the vector clocks raise, the worker aborts), or a request ends twice or never.
    """
    life = Life(Sim(overlap=overlap, depth=depth, pages=pages, prefix_caching=cache))
    for move in moves:
        life.move(move)
    life.sim.settle()
    life.check()


@settings(max_examples=30, deadline=None)
@given(moves=MOVES, depth=st.integers(1, 3), leads=st.lists(st.tuples(st.sampled_from(list(Lane)), st.integers(1, 4))))
def test_ranks_that_run_apart_give_the_same_tokens(
    moves: list[tuple[Any, ...]], depth: int, leads: list[tuple[Lane, int]]
) -> None:
    """L7: red when one rank's word is taken for all: the other's prefill still reads what is given away."""
    life = Life(Sim(overlap="green", depth=depth, pages=26, ranks=2))
    for at, move in enumerate(moves):
        life.move(move)
        if leads:
            life.sim.ranks[0].run_stream(*leads[at % len(leads)])
    life.sim.settle()
    life.check()


@pytest.mark.parametrize("overlap", ["off", "stream", "green"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_stop_ids_found_late_discard_rows(overlap: str, depth: int) -> None:
    """O12: red when a late row behind a stop is published, or its page is reused before its write is proven."""
    life = Life(Sim(overlap=overlap, depth=depth))
    life.add(3, 30, 0, 1, 5, 1)
    life.add(10, 12, 0, 2, None, 1)
    life.sim.settle()
    life.check()
    assert life.sim.finishes[1].reason == FINISH_STOP
    assert life.sim.engine.stats().rows_discarded <= depth - 1


@pytest.mark.parametrize("overlap", ["stream", "green"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefix_pages_under_a_prefill_in_flight_are_not_given_away(overlap: str, depth: int) -> None:
    """O11, O12: red when pages that a prefill in flight reads or writes are flushed, evicted or freed by its abort."""
    life = Life(Sim(overlap=overlap, depth=depth, pages=16))
    life.add(20, 1, 0, 1, None, 1)
    life.sim.settle()
    life.add(5, 20, 0, 2, None, 1)
    life.sim.turn()
    life.add(30, 4, 0, 1, None, 1)
    life.sim.turn(prefill=0)
    assert life.sim.scheduler.sequences.find(1, 3) is not None
    assert life.sim.engine.stats().prefix_hits == 5
    assert life.sim.engine.stats().prefills_in_flight == 1
    life.move(("abort", 3))
    life.move(("flush",))
    life.add(24, 4, 0, 3, None, 1)
    for _ in range(4):
        life.sim.turn(prefill=0)
        assert life.sim.engine.stats().pages_retiring >= 8
    life.sim.settle()
    life.check()


@pytest.mark.parametrize("overlap", ["stream", "green"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prefill_is_computed_while_decode_steps_stand_still(overlap: str, depth: int) -> None:
    """O1: red when a batch waits for a decode step in flight, or its rows' tables are written on the primary lane,
    where nothing orders them ahead of it: the vector clocks raise, the worker aborts."""
    life = Life(Sim(overlap=overlap, depth=depth))
    sim, (rank,) = life.sim, life.sim.ranks
    life.add(5, 20, 0, 2, None, 1)
    sim.turn()
    sim.step_engine()
    sim.step_worker()
    sim.run_stream(Lane.PRIMARY, 2)
    sim.step_worker()
    life.add(20, 4, 0, 1, None, 1)
    sim.step_engine()
    sim.step_worker()
    assert sim.engine.stats().prefills_in_flight == 1
    assert len(rank.runner._steps) == depth
    sim.run_stream(Lane.PREFILL, 99)
    assert not rank.streams[Lane.PREFILL].queue
    assert rank.streams[Lane.PRIMARY].queue
    sim.settle()
    life.check()


@pytest.mark.parametrize("depth", [2, 3])
def test_a_prompt_goes_on_on_the_lane_behind_its_chunks_on_the_other(depth: int) -> None:
    """O1: red when a batch isn't ordered behind the steps in flight with chunks: it reads what they write (the vector
    clocks raise, the worker aborts)."""
    life = Life(Sim(overlap="green", depth=depth))
    sim, (rank,) = life.sim, life.sim.ranks
    life.add(6, 7, 0, 1, None, 1)
    life.add(26, 2, 0, 2, None, 1)
    sim.step_engine()
    sim.step_worker()
    assert [len(plan.chunks) for plan in sim.executor.plans[:2]] == [2, 1]
    assert sim.executor.lane_steps == {2}
    sim.run_stream(Lane.PREFILL, 99)
    assert rank.streams[Lane.PREFILL].queue
    sim.settle()
    life.check()


@pytest.mark.parametrize("depth", [2, 3])
def test_the_pages_of_a_late_row_wait_for_its_step(depth: int) -> None:
    """O12: red when a stopped row's pages come back while the row behind the stop is still being computed."""
    life = Life(Sim(overlap="off", depth=depth, prefix_caching=False))
    life.add(3, 30, 0, 1, 5, 1)
    while 1 not in life.sim.finishes:
        life.sim.step_worker()
        life.sim.run_stream(Lane.PRIMARY, 2)
        life.sim.step_worker()
        life.sim.step_engine()
    gauges = life.sim.scheduler.gauges()
    assert (gauges.steps_in_flight, gauges.pages_retiring) == (depth - 1, 3)
    life.sim.settle()
    life.check()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_pages_of_a_preempted_prefill_wait_for_its_lane(depth: int) -> None:
    """O12: red when a preempted prompt's pages go to another row while its prefill still writes them."""
    life = Life(Sim(overlap="green", depth=depth, pages=7))
    life.add(5, 9, 0, 1, None, 1)
    life.sim.turn()
    life.add(16, 2, 0, 2, None, 1)
    for _ in range(8):
        life.sim.turn(prefill=0)
    gauges = life.sim.scheduler.gauges()
    assert life.sim.engine.stats().preemptions == 1
    assert (gauges.prefills_in_flight, gauges.pages_retiring) == (1, 4)
    life.sim.settle()
    life.check()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_siblings_find_their_prompt_after_its_join(depth: int) -> None:
    """O8: red when the siblings of a prompt in flight start before its pages are visible, or never."""
    life = Life(Sim(overlap="green", depth=depth))
    life.add(5, 24, 0, 2, None, 1)
    life.sim.turn()
    life.add(24, 3, 0, 1, None, 3)
    for _ in range(3):
        life.sim.turn(prefill=0)
        assert life.sim.engine.stats().running == 2
    life.sim.settle()
    life.check()
    assert life.sim.engine.stats().prefix_hits == 2 * 5
