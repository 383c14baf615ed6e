"""What a matrix product takes by one algorithm: alone on its lane's SMs, and beside the other lane of a split.

Owns the measuring: over the weights of several layers, so that none of them is still in the cache, and over random
inputs, as in service: with zeros a card is faster. Times on a lane come from the host's clock over many replays: the
stream of a Green Context takes no timing event (rule E2). Decode graphs are replayed on the primary stream, which does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from engine_core.device.cuda.graphs import GraphPool
from engine_core.device.cuda.tuning import Neighbour, Wanted
from engine_core.ops.cuda.cublaslt import Algorithm, Problem
from engine_core.ops.cuda.decoder import Weights
from engine_core.ops.cuda.streamk import streams

_cuda: Any = torch.cuda  # torch's annotations of streams and events are incomplete
Replay = Callable[[], None]
COLD_BYTES = 200 << 20
"""Weights that are read between two uses of the same: four times the second-level cache."""
LONG_ROWS = 1024
"""From so many rows on a product takes longer than the reading of its weights."""
MEASURE_S = 1.5e-3
BESIDE_S = 8e-3
"""Of a prefill's products, while decode's run beside them."""
LOAD_LAYERS = 4
"""Whose products the neighbour runs, again and again."""


class ProductTimes:
    """See `tuning.Times`. The device is idle before and after each call."""

    def __init__(self, primary: Any) -> None:
        """`primary`: the stream that decode graphs are replayed on."""
        self._primary = primary
        self._pool = GraphPool()
        """Of one shape's products, which run one at a time."""
        self._shape: tuple[int, ...] = ()
        self._latest: Replay | None = None
        """A pool may be used again for as long as one of its graphs lives."""
        self._loads: dict[int, Replay] = {}
        """By the neighbour's stream."""

    def alone(self, group: Wanted, rows: int, problem: Problem, algorithm: Algorithm) -> float:
        replay, count = self._capture(group, rows, problem, algorithm)
        with _cuda.stream(group.stream):
            repeats = max(1, min(50, round(MEASURE_S / _timed(group.stream, replay, 1))))
            return min(_timed(group.stream, replay, repeats) for _ in range(2)) / count

    def beside(self, group: Wanted, rows: int, problem: Problem, algorithm: Algorithm) -> float:
        neighbour = group.neighbour
        if neighbour is None:
            raise ValueError("a lane that shares the card with none has nothing beside it")
        own, _ = self._capture(group, rows, problem, algorithm)
        load = self.load(neighbour)
        pair = (group.stream, own, load) if neighbour.decodes else (neighbour.stream, load, own)
        prefill_s, decode_s = self.side_by_side(*pair)
        return prefill_s * decode_s

    def load(self, neighbour: Neighbour) -> Replay:
        """What replays the neighbour's products with what is chosen for them by now."""
        key = int(neighbour.stream.cuda_stream)
        if key not in self._loads:
            inputs = {id(weights): _random(neighbour.rows, weights) for weights in neighbour.weights}

            def work() -> None:
                for index in range(min(LOAD_LAYERS, len(neighbour.weights[0].matrices))):
                    for weights in neighbour.weights:
                        _multiply(neighbour, weights, index, inputs[id(weights)])

            _cuda.synchronize()
            self._loads[key] = GraphPool().capture(neighbour.stream, work)
        return self._loads[key]

    def side_by_side(self, lane: Any, prefill: Replay, decode: Replay) -> tuple[float, float]:
        """Seconds of a prefill replay on its lane, and of a decode replay, of two in flight while the lane is busy.

        Three at least: a host that stands still may find the lane idle at its first look.
        """
        with _cuda.stream(lane):
            repeats = max(2, round(BESIDE_S / _timed(lane, prefill, 1)))
            began = time.perf_counter()
            for _ in range(repeats):
                prefill()
        ends: list[Any] = []
        with _cuda.stream(self._primary):
            begin = self._primary.record_event(_cuda.Event(enable_timing=True))
            while len(ends) < 3 or not lane.query():
                if len(ends) < 2 or ends[-2].query():
                    decode()
                    ends.append(self._primary.record_event(_cuda.Event(enable_timing=True)))
        took = time.perf_counter() - began
        self._primary.synchronize()
        count = len(ends) - 2
        return took / repeats, 1e-3 * float(begin.elapsed_time(ends[count - 1])) / count

    def _capture(self, group: Wanted, rows: int, problem: Problem, algorithm: Algorithm) -> tuple[Replay, int]:
        """What replays some products, and how many."""
        weights = group.weights
        size = weights.matrices[0].numel() * 2
        count = 1 if rows >= LONG_ROWS else min(len(weights.matrices), max(1, -(-COLD_BYTES // size)))
        x = _random(rows, weights)

        def work() -> None:
            for index in range(count):
                bias = None if weights.biases is None else weights.biases[index]
                problem.launch(algorithm, x, weights.matrices[index], bias)

        shape = int(group.stream.cuda_stream), rows, *weights.matrices[0].shape
        if self._shape != shape:
            self._shape = shape
            self._pool, self._latest = GraphPool(), None
            _cuda.empty_cache()
        group.stream.wait_stream(_cuda.current_stream())
        self._latest = self._pool.capture(group.stream, work)
        return self._latest, count


def _multiply(neighbour: Neighbour, weights: Weights, index: int, x: torch.Tensor) -> None:
    if neighbour.decodes and weights.streamed is not None and streams(neighbour.rows, neighbour.multiply.sms):
        weights.streamed[index](x, neighbour.multiply.sms)
    else:
        neighbour.multiply(x, weights.matrices[index], None if weights.biases is None else weights.biases[index])


def _random(rows: int, weights: Weights) -> torch.Tensor:
    matrix = weights.matrices[0]
    return torch.randn(rows, matrix.shape[1], dtype=torch.bfloat16, device=matrix.device)


def _timed(stream: Any, replay: Replay, repeats: int) -> float:
    stream.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        replay()
    stream.synchronize()
    return (time.perf_counter() - began) / repeats
