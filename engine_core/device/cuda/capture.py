"""Every graph of a CUDA worker, captured at start, and before that the algorithms of the matrix products in them.

Owns which shapes there are. `forwards.py` says what a graph does, `graphs.py` how one is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from engine_core.device.cuda.compute import Replay
from engine_core.device.cuda.forwards import Opened, decode, head, ragged
from engine_core.device.cuda.graphs import Captures, GraphPool
from engine_core.device.cuda.tuning import Wanted, keep, tune
from engine_core.ops.cuda.attention import DecodeAttention
from engine_core.ops.cuda.decoder import FEW_ROWS
from engine_core.ops.cuda.splits import PAGE
from engine_core.step import MOST_PRIMARY_TOKENS, Lane

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete
Progress = Callable[[str, int, int], None]


def ragged_shapes(opened: Opened, lane: Lane) -> list[tuple[int, int]]:
    """(decode rows, tokens of chunks) of the lane's forwards with chunks."""
    if lane is not Lane.PRIMARY:
        return [(0, tokens) for tokens in opened.chunk_sizes[0]]
    shapes = [(rows, tokens) for rows, sizes in opened.chunk_sizes.items() for tokens in sizes]
    if opened.config.decode_overlap != "auto":
        return shapes
    return [(rows, tokens) for rows, tokens in shapes if tokens <= MOST_PRIMARY_TOKENS]


def tune_products(opened: Opened, progress: Progress) -> None:
    """Choose an algorithm for every product of the graphs, unless an earlier start did."""
    if tune(_wanted(opened), lambda done, total: progress("choose matrix products", done, total)):
        keep(opened.choices)


def _wanted(opened: Opened) -> Iterator[Wanted]:
    decode_rows = tuple(rows for rows in opened.row_buckets if rows > FEW_ROWS)
    primary = opened.lanes[Lane.PRIMARY].stream
    yield Wanted(opened.multiply(opened.sms), primary, opened.decoder.head_weights(), decode_rows)
    for weights in opened.decoder.weights():
        yield Wanted(opened.multiply(opened.sms), primary, weights, decode_rows)
        if opened.partition is not None:
            green = _cuda.ExternalStream(int(opened.partition.decode.stream))
            yield Wanted(opened.multiply(opened.partition.decode_sms), green, weights, decode_rows)
        for lane, work in opened.lanes.items():
            totals = tuple({rows + tokens for rows, tokens in ragged_shapes(opened, lane)})
            yield Wanted(opened.multiply(opened.sms_of(lane)), work.stream, weights, totals)


class Capture:
    """Captures every graph, largest first; one pool for the primary lane, one for the prefill lane (S3)."""

    def __init__(self, opened: Opened, kv: torch.Tensor, progress: Progress) -> None:
        self._opened = opened
        self._kv = kv
        self._progress = progress
        self._captures = Captures()
        self._pools = {lane: GraphPool() for lane in opened.lanes}
        self._attention = opened.attention(opened.sms)
        self._shapes = {lane: self._ragged_shapes(lane) for lane in opened.lanes}
        lanes = 1 if opened.partition is None else 2
        self._total = len(opened.row_buckets) * (lanes + 1) + sum(map(len, self._shapes.values()))
        self._done = 0

    def _ragged_shapes(self, lane: Lane) -> list[tuple[int, int]]:
        """(decode rows, tokens of chunks), largest first."""
        return sorted(ragged_shapes(self._opened, lane), key=sum, reverse=True)

    def _replay(self, lane: Lane, stream: Any, work: Callable[[], None], what: str, *, bound: bool = False) -> Replay:
        replay = self._captures.take(self._pools[lane], stream, work, what, bound=bound)
        self._done += 1
        self._progress("capture graphs", self._done, self._total)
        return replay

    def ragged(self) -> None:
        for lane, work in self._opened.lanes.items():
            for rows, tokens in self._shapes[lane]:
                with _cuda.stream(work.stream):
                    work.prefill.plan([0], [tokens], [np.zeros(-(-tokens // PAGE), np.int32)], bucket=tokens)
                forward = ragged(self._opened, lane, rows, tokens, self._attention, self._kv)
                work.ragged[rows, tokens] = self._replay(
                    lane, work.stream, forward, f"{tokens} tokens behind {rows} rows"
                )

    def decode(self) -> dict[bool, dict[int, Replay]]:
        """By whether a prefill is in flight beside it; the same graphs where there is no partition to keep to."""
        opened, primary = self._opened, self._opened.lanes[Lane.PRIMARY].stream
        lone = self._decode(primary, opened.sms, self._attention)
        if opened.partition is None:
            return {False: lone, True: lone}
        green = _cuda.ExternalStream(int(opened.partition.decode.stream))
        sms = opened.partition.decode_sms
        return {False: lone, True: self._decode(green, sms, opened.attention(sms), bound=True)}

    def _decode(self, stream: Any, sms: int, attention: DecodeAttention, *, bound: bool = False) -> dict[int, Replay]:
        opened, multiply = self._opened, self._opened.multiply(sms)
        steps = {rows: decode(opened, rows, attention, multiply, self._kv) for rows in reversed(opened.row_buckets)}
        return {
            rows: self._replay(Lane.PRIMARY, stream, step, f"{rows} decode rows", bound=bound)
            for rows, step in steps.items()
        }

    def heads(self) -> None:
        opened, stream = self._opened, self._opened.lanes[Lane.PRIMARY].stream
        for rows in reversed(opened.row_buckets):
            opened.heads.graphs[rows] = self._replay(Lane.PRIMARY, stream, head(opened, rows), f"{rows} draws")
