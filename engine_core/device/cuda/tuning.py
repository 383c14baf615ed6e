"""Which algorithm each matrix product takes: measured once for a card, a library and a model's shapes, then kept.

Owns the measuring at start, on the lane's own SMs, over the weights of several layers, so that none of them is still in
the cache, and over random inputs, as in service: with zeros a card is faster. Times come from the host's clock
over many replays: a Green Context's stream takes no timing event (rule E2).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from engine_core.device.cuda.graphs import GraphPool
from engine_core.errors import describe_chain
from engine_core.log import event
from engine_core.ops.cuda.cublaslt import Problem, Product
from engine_core.ops.cuda.decoder import Weights
from engine_core.ops.cuda.matmul import Choices, LaneMatmul

log = logging.getLogger("greenlane.worker")

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete
COLD_BYTES = 200 << 20
"""Weights that are read between two uses of the same: four times the second-level cache."""
MEASURE_S = 1.5e-3


@dataclass(frozen=True, slots=True)
class Wanted:
    """Products of some weights, of so many rows each, on a lane."""

    multiply: LaneMatmul
    stream: Any
    weights: Weights
    rows: tuple[int, ...]


def tune(wanted: Iterable[Wanted], progress: Callable[[int, int], None]) -> int:
    """Choose for every product that has no choice yet; how many those were. The device is idle before and after."""
    unmeasured: dict[Product, tuple[Wanted, Problem]] = {}
    for group in wanted:
        for rows in group.rows:
            product = _product(group, rows)
            problem = group.multiply.unmeasured(product)
            if problem is not None:
                unmeasured[product] = (group, problem)
    for done, (product, (group, problem)) in enumerate(unmeasured.items()):
        progress(done, len(unmeasured))
        times = [_seconds(group, product.rows, problem, place) for place in range(len(problem))]
        group.multiply.choose(product, times.index(min(times)))
    if unmeasured:
        progress(len(unmeasured), len(unmeasured))
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


def _seconds(group: Wanted, rows: int, problem: Problem, place: int) -> float:
    """Of one product by that candidate."""
    weights = group.weights
    size = weights.matrices[0].numel() * 2
    count = min(len(weights.matrices), max(1, -(-COLD_BYTES // size)))
    x = torch.randn(rows, weights.matrices[0].shape[1], dtype=torch.bfloat16, device=weights.matrices[0].device)

    def work() -> None:
        for index in range(count):
            bias = None if weights.biases is None else weights.biases[index]
            problem.launch(place, x, weights.matrices[index], bias)

    stream = group.stream
    stream.wait_stream(_cuda.current_stream())
    replay = GraphPool().capture(stream, work)
    with _cuda.stream(stream):
        once = _timed(stream, replay, 1)
        repeats = max(1, min(50, round(MEASURE_S / once)))
        return min(_timed(stream, replay, repeats) for _ in range(2)) / count


def _timed(stream: Any, replay: Callable[[], None], repeats: int) -> float:
    stream.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        replay()
    stream.synchronize()
    return (time.perf_counter() - began) / repeats
