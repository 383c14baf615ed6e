"""Which algorithm each matrix product takes: measured once for a card, a library and a model's shapes, then kept.

Owns the choice; `product_times.py` owns the measuring. On a lane that shares the card the fastest alone isn't always
the best: algorithms differ in how much power and cache bandwidth they take from the other lane. So those that are
nearly as fast are measured once more beside the other lane's work, and what both lanes take, multiplied, decides: a
split of the SMs trades the one for the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine_core.errors import describe_chain
from engine_core.log import event
from engine_core.ops.cuda.cublaslt import Algorithm, Problem, Product
from engine_core.ops.cuda.decoder import Weights
from engine_core.ops.cuda.matmul import Choices, LaneMatmul

log = logging.getLogger("greenlane.worker")

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete
NEAR = 1.15
"""Algorithms that take up to so many times as long as the fastest are measured beside the other lane's work, too."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What runs on the other lane of a split meanwhile: layers' products."""

    multiply: LaneMatmul
    stream: Any
    weights: list[Weights]
    rows: int
    decodes: bool
    """Whether that is the decode lane."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Products of some weights, of so many rows each, on a lane."""

    multiply: LaneMatmul
    stream: Any
    weights: Weights
    rows: tuple[int, ...]
    neighbour: Neighbour | None = None


class Times(Protocol):
    """What `tune` needs of `ProductTimes`."""

    def alone(self, group: Wanted, rows: int, problem: Problem, algorithm: Algorithm) -> float:
        """Seconds of one product with the lane to itself."""

    def beside(self, group: Wanted, rows: int, problem: Problem, algorithm: Algorithm) -> float:
        """Its time beside the group's neighbour, times the neighbour's beside it."""


def tune(wanted: Iterable[Wanted], times: Times, progress: Callable[[int, int], None]) -> int:
    """Choose for every product that has no choice yet; how many those were. The device is idle before and after."""
    unmeasured: dict[Product, tuple[Wanted, Problem]] = {}
    for group in wanted:
        for rows in group.rows:
            product = _product(group, rows)
            problem = group.multiply.unmeasured(product)
            if problem is not None:
                unmeasured[product] = (group, problem)
    near: dict[Product, list[Algorithm]] = {}
    for done, (product, (group, problem)) in enumerate(unmeasured.items()):
        progress(done, 2 * len(unmeasured))
        seconds = {way: times.alone(group, product.rows, problem, way) for way in problem.proposals()}
        least = min(seconds.values())
        near[product] = [way for way, took in seconds.items() if took <= NEAR * least]
        group.multiply.choose(product, min(seconds, key=lambda way: seconds[way]))
    for done, (product, (group, problem)) in enumerate(unmeasured.items()):
        progress(len(unmeasured) + done, 2 * len(unmeasured))
        if group.neighbour is not None and len(near[product]) > 1:
            costs = {way: times.beside(group, product.rows, problem, way) for way in near[product]}
            group.multiply.choose(product, min(costs, key=lambda way: costs[way]))
    if unmeasured:
        progress(2 * len(unmeasured), 2 * len(unmeasured))
        _cuda.empty_cache()
    return len(unmeasured)


def keep(choices: Choices) -> None:
    """For the next start; where that can't be, it will measure anew, which takes some seconds."""
    try:
        choices.save()
    except OSError as error:
        event(log, logging.WARNING, "choices_not_kept", cause=describe_chain(error))


def _product(group: Wanted, rows: int) -> Product:
    weights = group.weights
    return group.multiply.product(rows, weights.matrices[0], wide=weights.wide, biased=weights.biases is not None)
