"""CUDA graphs of a worker: what is captured, on which stream, and where its memory lives.

Owns capture and the pools (rules L2, L3, S3): capture happens at start only, on the lane's stream, largest bucket
first, so that smaller ones reuse its memory. A graph stays bound to the SMs and the priority of the stream it was
captured on, wherever it is replayed.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine_core.errors import ConfigError, describe_chain
from engine_core.log import event

log = logging.getLogger("greenlane.worker")
_cuda: Any = torch.cuda  # torch's annotations of streams and graphs are incomplete


def buckets(largest: int, sizes: tuple[int, ...]) -> list[int]:
    """The sizes below `largest`, and `largest` itself, ascending."""
    return [size for size in sizes if size < largest] + [largest]


DECODE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
MIXED_ROWS = (8, 16, 32, 64, 128, 256)
"""Decode rows that share a forward with chunks: few buckets, for each stands beside every size of chunk."""
MIXED_TOTALS = (
    *(64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048),
    *(3072, 4096, 6144, 8192, 12288, 16384),
)
"""Tokens of such a forward, decode rows included. Matrix products come in tiles of 64 or 128 rows: 272 rows take an
eighth longer than 256 on an H200, and 576 nearly as long as 640."""
TILE_CHUNK = 256
"""Two tiles of prefill attention, each of which takes its time however full it is."""
LEAST_CHUNK = 32
CHUNK_SIZES = (
    *(32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048),
    *(3072, 4096, 6144, 8192, 12288, 16384),
)
LANE_SIZES = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Tokens of a batch on the prefill lane: fewer sizes, since each partition has graphs of its own."""


def mixed_chunk_sizes(rows: int, most: int) -> list[int]:
    """Tokens of the chunks that share a forward with so many decode rows: up to `most`, ascending."""
    sizes = {TILE_CHUNK, *(total - rows for total in MIXED_TOTALS)}
    return [size for size in sorted(sizes) if LEAST_CHUNK <= size < most] + [most]


def bucket_of(available: list[int], count: int) -> int:
    """The smallest bucket that holds `count`."""
    return next(size for size in available if size >= count)


@dataclass(frozen=True, slots=True)
class Forward:
    """Work over a model's layers, to be captured."""

    run: Callable[[int], None]
    """Over so many of the first layers."""
    layers: int
    rehearsed: int = 1
    """How many launch every kernel that all of them do."""

    def __call__(self) -> None:
        self.run(self.layers)

    def rehearse(self) -> None:
        self.run(min(self.rehearsed, self.layers))


class _Replay(functools.partial[None]):
    """A partial for its speed."""

    kept: object

    def keeping(self, kept: object) -> Callable[[], None]:
        self.kept = kept
        return self


class GraphPool:
    """Graphs that share memory because they never run at the same time: one lane's."""

    def __init__(self) -> None:
        self._pool = _cuda.graph_pool_handle()

    def capture(
        self, stream: Any, work: Callable[[], None], rehearse: Callable[[], None] | None = None
    ) -> Callable[[], None]:
        """Run the work once eagerly on the stream (lazy modules, library workspaces), then capture it there.

        `rehearse`: shorter work that launches the same kernels, to be run instead.
        Returns what replays it on torch's current stream, and keeps the work alive: a graph names the buffers that its
        work closed over by their addresses, holding none of them. The caller owns synchronization before and after.
        """
        graph = _cuda.CUDAGraph()
        with _cuda.stream(stream):
            (rehearse or work)()
            stream.synchronize()
            # `torch.cuda.graph` would also give back all unused memory, of the device and pinned: some ms each time
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        # torch's own method around it looks up devices and streams, which the launch doesn't need
        return _Replay(torch._C._CUDAGraph.replay, graph).keeping(work)


BUDGET_S = 60.0
"""For all captures of a start. A 4B model's take 3 to 5 s."""


class Pool(Protocol):
    """What `Captures` needs of `GraphPool`."""

    def capture(
        self, stream: Any, work: Callable[[], None], rehearse: Callable[[], None] | None
    ) -> Callable[[], None]: ...


class Captures:
    """Captures as long as that goes well and BUDGET_S aren't over; from then on work stays eager, which is said (S3).

    Eager work is slower, by its host time, and does the same.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deadline = clock() + BUDGET_S
        self._ended: str | None = None

    def take(
        self,
        pool: Pool,
        stream: Any,
        work: Callable[[], None],
        what: str,
        *,
        bound: bool,
        rehearse: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        """What replays the work, or the work itself.

        `bound`: only a graph keeps it to its SMs; raises ConfigError then, since eager work would leave them (rule L2).
        """
        if self._ended is None and self._clock() > self._deadline:
            self._end(f"the graphs took longer than {BUDGET_S:g} s to capture")
        if self._ended is None:
            try:
                return pool.capture(stream, work, rehearse)
            except RuntimeError as error:  # all that torch and CUDA raise, memory that runs out included
                self._end(f"the graph of {what} can't be captured: {describe_chain(error)}")
        if bound:
            raise ConfigError(f"{self._ended}; --decode-overlap green and auto need it, use off or stream")
        return work

    def _end(self, cause: str) -> None:
        self._ended = cause
        event(log, logging.WARNING, "capture_ended", cause=cause, rest="runs eagerly, which is slower")
