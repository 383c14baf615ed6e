"""Schedules in which time moves, so that plans beside a prefill are held (worker/pace.py)."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from engine_core.step import Lane
from tests.sim.harness import Sim
from tests.sim.test_schedules import Life

RUNS = 120


def draw(chance: random.Random) -> tuple[Any, ...]:
    """Weighted so that decode and prefill often overlap."""
    kind = chance.choices(
        ("add", "abort", "engine", "worker", "primary", "prefill", "tick"), (12, 2, 25, 20, 15, 8, 12)
    )
    match kind[0]:
        case "add":
            sizes = chance.randrange(1, 41), chance.randrange(1, 21), chance.randrange(3), chance.randrange(4)
            return ("add", *sizes, None, 1)
        case "abort":
            return ("abort", chance.randrange(30))
        case "primary" | "prefill":
            return ("run", Lane.PRIMARY if kind[0] == "primary" else Lane.PREFILL, chance.randrange(1, 4))
        case "tick":
            return ("tick", chance.choice((0.0005, 0.003, 0.01, 0.05)))
        case other:
            return (other,)


@pytest.mark.parametrize("overlap", ["stream", "green", "auto"])
def test_held_plans_change_no_token_and_none_is_lost(overlap: str) -> None:
    """Red when a held plan is forgotten, changes a token, or no plan is ever held here."""
    held = 0
    for seed in range(RUNS):
        chance, now = random.Random(seed), [0.0]
        life = Life(Sim(overlap=overlap, depth=chance.choice((2, 3))))
        (rank,) = life.sim.ranks
        rank.runner._now = functools.partial(now.__getitem__, 0)
        for _ in range(100):
            move = draw(chance)
            if move[0] == "tick":
                now[0] += move[1]
            else:
                life.move(move)
            held += rank.worker._held is not None
        now[0] += 10.0
        life.sim.settle()
        life.check()
    assert held > 0
