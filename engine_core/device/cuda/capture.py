"""Every graph of a CUDA worker, captured at start, and before that the algorithms of the matrix products in them.

Owns which shapes there are. `forwards.py` says what a graph does, `graphs.py` how one is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from engine_core.device.cuda.compute import LaneWork, Replay
from engine_core.device.cuda.forwards import Opened, decode, few_drawn, head, last_layer, ragged
from engine_core.device.cuda.graphs import Captures, Forward, GraphPool, bucket_of
from engine_core.device.cuda.product_times import ProductTimes
from engine_core.device.cuda.tuning import Neighbour, Wanted, keep, tune
from engine_core.device.green import GreenPartition
from engine_core.ops.cuda.attention import DecodeAttention
from engine_core.ops.cuda.decoder import FEW_ROWS
from engine_core.ops.cuda.splits import PAGE
from engine_core.ops.cuda.streamk import streams
from engine_core.step import MOST_PRIMARY_TOKENS

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete
Progress = Callable[[str, int, int], None]


def ragged_shapes(opened: Opened, work: LaneWork) -> list[tuple[int, int]]:
    """(decode rows, tokens of chunks) of a lane's forwards with chunks."""
    if work is not opened.primary:
        return [(0, tokens) for tokens in opened.lane_sizes]
    shapes = [(rows, tokens) for rows, sizes in opened.chunk_sizes.items() for tokens in sizes]
    if opened.config.decode_overlap != "auto":
        return shapes
    return [(rows, tokens) for rows, tokens in shapes if tokens <= MOST_PRIMARY_TOKENS]


DECODE_LOAD_ROWS, PREFILL_LOAD_TOKENS = 64, 2048
"""Of the steps and batches that run beside what is measured, as far as there are so many."""


def tune_products(opened: Opened, progress: Progress) -> None:
    """Choose an algorithm for every product of the graphs, unless an earlier start did."""
    times = ProductTimes(opened.primary.stream)
    if tune(_wanted(opened), times, lambda done, total: progress("choose matrix products", done, total)):
        keep(opened.choices)


def _wanted(opened: Opened) -> Iterator[Wanted]:
    decode_rows = _multiplied_rows(opened, opened.sms)
    card, primary = opened.multiply(opened.sms), opened.primary.stream
    yield Wanted(card, primary, opened.decoder.head_weights(), decode_rows)
    for weights in opened.decoder.weights():
        yield Wanted(card, primary, weights, decode_rows)
        for work in [opened.primary] if opened.partitions else opened.works:
            totals = {opened.row_buckets[-1], *(rows + tokens for rows, tokens in ragged_shapes(opened, work))}
            yield Wanted(work.multiply, work.stream, weights, tuple(totals))
    if opened.partitions:
        for partition, work in zip(opened.partitions, opened.prefills, strict=True):
            yield from _split(opened, partition, work)


def _multiplied_rows(opened: Opened, sms: int) -> tuple[int, ...]:
    """Decode rows whose products are cuBLASLt's on a lane of so many SMs."""
    return tuple(rows for rows in opened.row_buckets if rows > FEW_ROWS and not streams(rows, sms))


def _split(opened: Opened, partition: GreenPartition, work: LaneWork) -> Iterator[Wanted]:
    """Both lanes of a partition, each beside the other."""
    every, green = opened.decoder.weights(), _cuda.ExternalStream(int(partition.decode.stream))
    multiply, rows = opened.multiply(partition.decode_sms), opened.row_buckets
    load_rows = bucket_of(rows, min(DECODE_LOAD_ROWS, rows[-1]))
    load_tokens = bucket_of(opened.lane_sizes, min(PREFILL_LOAD_TOKENS, opened.lane_sizes[-1]))
    decoding = Neighbour(multiply, green, every, load_rows, decodes=True)
    decode_rows = _multiplied_rows(opened, partition.decode_sms)
    prefilling = Neighbour(work.multiply, work.stream, every, load_tokens, decodes=False)
    yield Wanted(multiply, green, opened.decoder.head_weights(), decode_rows, prefilling)
    for weights in every:
        yield Wanted(multiply, green, weights, decode_rows, prefilling)
        yield Wanted(work.multiply, work.stream, weights, tuple({rows[-1], *opened.lane_sizes}), decoding)


class Capture:
    """Captures every graph, largest first; one pool for the primary lane, one for the prefill lane (S3)."""

    def __init__(self, opened: Opened, kv: torch.Tensor, progress: Progress) -> None:
        self._opened = opened
        self._kv = kv
        self._progress = progress
        self._captures = Captures()
        self._primary, self._prefill = GraphPool(), GraphPool()
        self._attention = opened.attention(opened.sms)
        self._shapes = [sorted(ragged_shapes(opened, work), key=sum, reverse=True) for work in opened.works]
        self._total = 2 * len(opened.row_buckets) * (1 + len(opened.partitions)) + sum(map(len, self._shapes))
        self._done = 0

    def _replay(
        self, pool: GraphPool, stream: Any, work: Forward | Callable[[], None], what: str, *, bound: bool = False
    ) -> Replay:
        rehearse = work.rehearse if isinstance(work, Forward) else None
        replay = self._captures.take(pool, stream, work, what, bound=bound, rehearse=rehearse)
        self._done += 1
        self._progress("capture graphs", self._done, self._total)
        return replay

    def ragged(self) -> None:
        opened, attention, kv = self._opened, self._attention, self._kv
        for work, shapes in zip(opened.works, self._shapes, strict=True):
            pool = self._primary if work is opened.primary else self._prefill
            drawing = attention if work is opened.primary else opened.attention(work.multiply.sms)
            for rows, tokens in shapes:
                with _cuda.stream(work.stream):
                    work.prefill.plan([0], [tokens], [np.zeros(-(-tokens // PAGE), np.int32)], bucket=tokens)
                if few_drawn(opened, tokens):
                    work.last_layer[rows, tokens] = last_layer(opened, work, rows, tokens, attention, kv)
                forward = ragged(opened, work, rows, tokens, attention, drawing, kv)
                work.ragged[rows, tokens] = self._replay(
                    pool, work.stream, forward, f"{tokens} tokens behind {rows} rows"
                )
            _cuda.empty_cache()  # what rehearsals took on this stream serves no other

    def decode(self) -> dict[int | None, dict[int, Replay]]:
        """By the partition in force beside a prefill, None: none; the same graphs where there is none to keep to."""
        opened = self._opened
        lone = self._decode(opened.primary.stream, opened.sms, self._attention)
        decoding: dict[int | None, dict[int, Replay]] = {None: lone, 0: lone}
        for index, partition in enumerate(opened.partitions):
            green, sms = _cuda.ExternalStream(int(partition.decode.stream)), partition.decode_sms
            decoding[index] = self._decode(green, sms, opened.attention(sms), bound=True)
        return decoding

    def _decode(self, stream: Any, sms: int, attention: DecodeAttention, *, bound: bool = False) -> dict[int, Replay]:
        opened, multiply = self._opened, self._opened.multiply(sms)
        replays = {}
        for rows in reversed(opened.row_buckets):
            step = decode(opened, rows, attention, multiply, self._kv)
            replays[rows] = self._replay(self._primary, stream, step, f"{rows} decode rows", bound=bound)
        _cuda.empty_cache()
        return replays

    def heads(self) -> None:
        """By partition, as `decode`: draws of the whole card would wait for thread blocks of the prefill."""
        opened = self._opened
        lone = self._heads(opened.primary.stream, opened.sms)
        opened.heads.graphs |= {None: lone, 0: lone}
        for index, partition in enumerate(opened.partitions):
            green = _cuda.ExternalStream(int(partition.decode.stream))
            opened.heads.graphs[index] = self._heads(green, partition.decode_sms, bound=True)

    def _heads(self, stream: Any, sms: int, *, bound: bool = False) -> dict[int, Replay]:
        opened, multiply = self._opened, self._opened.multiply(sms)
        replays = {}
        for rows in reversed(opened.row_buckets):
            draw = head(opened, rows, multiply)
            replays[rows] = self._replay(self._primary, stream, draw, f"{rows} draws", bound=bound)
        _cuda.empty_cache()
        return replays
