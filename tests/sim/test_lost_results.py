"""Results that are lost or don't answer their plan, from the worker's frame to the client's last word (rule O8)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from engine_core.errors import StatusCode
from engine_core.step import Lane, PrefillResult, StepResult
from tests.sim.harness import Sim

DECODING, PROMPT, WAITING = 1, 2, 3
replace = msgspec.structs.replace


def prefill(result: StepResult, **changes: object) -> StepResult:
    return replace(result, prefills=[replace(result.prefills[0], **changes)])


PREFILL_LOSSES: dict[str, tuple[Callable[[StepResult], StepResult], str]] = {
    "no tokens": (lambda result: prefill(result, tokens=b""), "0 bytes of tokens answer 1 finished prompts"),
    "two tokens": (lambda result: prefill(result, tokens=b"\0" * 8), "8 bytes of tokens answer 1 finished prompts"),
    "another step": (lambda result: prefill(result, step=1), "prefills of steps [1] were reported"),
    "twice": (lambda result: replace(result, prefills=result.prefills * 2), "in flight is that of step"),
}
STEP_LOSSES: dict[str, tuple[Callable[[StepResult], StepResult], str]] = {
    "no tokens": (lambda result: replace(result, tokens=b""), "0 bytes of tokens answer 1 rows"),
    "another step": (lambda result: replace(result, step=result.step + 1), "the worker answered step"),
    "no proof": (lambda result: replace(result, primary_complete=0), "its proof covers the primary lane up to step 0"),
    "a prefill of nobody": (
        lambda result: replace(result, prefills=[PrefillResult(1, b"")]),
        "prefills of steps [1] were reported",
    ),
}


def in_flight(depth: int) -> Sim:
    """One request decodes, one is in prefill on its own lane, one waits for a place."""
    sim = Sim(overlap="green", depth=depth)
    sim.add(DECODING, list(range(6)), 30)
    sim.turn()
    sim.add(PROMPT, list(range(40, 60)), 5)
    sim.turn(prefill=0)
    sim.add(WAITING, list(range(70, 80)), 5)
    assert sim.engine.stats().prefills_in_flight == 1
    return sim


def lose(sim: Sim, change: Callable[[StepResult], StepResult], *, joining: bool) -> None:
    """Change the next result that brings, or doesn't bring, a prefill; then see the engine to its end."""
    lost: list[int] = []

    def tamper(result: StepResult) -> StepResult:
        if bool(result.prefills) is not joining or lost:
            return result
        lost.append(result.step)
        return change(result)

    sim.executor.tamper = tamper
    sim.settle()
    assert lost


def message(sim: Sim, number: int) -> tuple[StatusCode, str]:
    error = sim.finishes[number].error
    assert error is not None
    return error.code, error.message


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("loss", PREFILL_LOSSES)
def test_o8_a_lost_prefill_fails_its_request_and_stops_the_engine(loss: str, depth: int) -> None:
    """O8: red when the loss is forgiven, blamed on others, told without its cause, or the pages are used again."""
    sim = in_flight(depth)
    change, cause = PREFILL_LOSSES[loss]
    lose(sim, change, joining=True)
    assert sim.engine_dead is not None
    assert "its result was lost or doesn't match its plan" in sim.engine_dead
    assert cause in sim.engine_dead
    assert message(sim, PROMPT) == (StatusCode.INTERNAL, sim.engine_dead)
    assert message(sim, WAITING) == (StatusCode.UNAVAILABLE, sim.engine_dead)
    sim.check_tokens()
    assert PROMPT not in sim.tokens
    assert sim.scheduler.gauges().pages_referenced >= 5


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("loss", STEP_LOSSES)
def test_o8_a_lost_step_fails_its_rows_and_stops_the_engine(loss: str, depth: int) -> None:
    """O8: red when decode rows go on without the token that was lost, or their pages are used again."""
    sim = in_flight(depth)
    change, cause = STEP_LOSSES[loss]
    lose(sim, change, joining=False)
    assert sim.engine_dead is not None
    assert cause in sim.engine_dead
    assert message(sim, DECODING)[0] is StatusCode.INTERNAL
    assert message(sim, WAITING)[0] is StatusCode.UNAVAILABLE
    sim.check_tokens()
    assert sim.scheduler.gauges().pages_referenced >= 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_o8_a_prefill_that_is_asked_for_and_kept_back_is_a_loss(depth: int) -> None:
    """O8, E7: red when an asked-for prefill that never comes makes the engine ask again and again."""
    sim = Sim(overlap="green", depth=depth)
    sim.add(DECODING, list(range(6)), 6)
    sim.turn()
    sim.add(PROMPT, list(range(40, 60)), 5)
    while sim.engine.stats().running != 1 or sim.scheduler.in_flight.working:
        sim.turn(prefill=0)
    sim.step_engine()
    assert sim.executor.plans[-1].decode_slots == b""
    lose(sim, lambda result: replace(result, prefills=[]), joining=True)
    code, text = message(sim, PROMPT)
    assert code is StatusCode.INTERNAL
    assert "it was asked for the prefill of step" in text
    assert sim.engine.stats().finished_length == 1


def test_o10_work_in_flight_holds_its_slot_and_pages() -> None:
    """O10: red when a launched prompt's slot or pages count as free before its join."""
    sim = Sim(overlap="green", depth=2, pages=16)
    sim.add(1, list(range(6)), 20)
    sim.turn()
    sim.add(2, list(range(40, 64)), 5)
    sim.add(3, list(range(70, 94)), 5)
    sim.turn(prefill=0)
    for _ in range(3):
        sim.turn(prefill=0)
        gauges = sim.scheduler.gauges()
        assert (gauges.running, gauges.waiting, gauges.prefills_in_flight) == (2, 1, 1)
        assert gauges.pages_referenced >= 2 + 6
    sim.settle()
    sim.check_tokens()
    assert {number: len(tokens) for number, tokens in sim.tokens.items()} == {1: 20, 2: 5, 3: 5}


def test_l7_a_prefill_is_complete_when_every_rank_has_said_so() -> None:
    """L7: red when the first rank's report is taken for all: the other still computes what would be given away."""
    sim = Sim(overlap="green", depth=2, ranks=2)
    sim.add(1, list(range(6)), 20)
    sim.turn()
    sim.add(2, list(range(40, 60)), 5)
    sim.turn(prefill=0)
    for _ in range(3):
        sim.ranks[0].table.run_all()
        sim.turn(prefill=0)
        assert sim.engine.stats().prefills_in_flight == 1
        assert 2 not in sim.tokens
    assert sim.ranks[0].lanes.proven(Lane.PREFILL) > sim.ranks[1].lanes.proven(Lane.PREFILL)
    sim.settle()
    sim.check_tokens()
    assert len(sim.tokens[2]) == 5
