"""What this GPU's forwards take, measured at start over the captured graphs: what the lanes' policy predicts from.

Owns the measuring; `scheduling/policy.py` owns what follows from it. Rows have no context unless said: their slots are
-1, so that attention has nothing to read and nothing is written. Times on the prefill lane come from the host's clock
(its stream may be of a Green Context, which takes no timing event, rule E2).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_core.device.cuda.compute import Heads, LaneWork, Replay
from engine_core.device.cuda.forwards import Opened
from engine_core.device.cuda.graphs import bucket_of
from engine_core.ops.cuda.splits import PAGE
from engine_core.step import Lane, StepTimes

_cuda: Any = torch.cuda  # torch's annotations of streams and events are incomplete
REPEATS = 3
CONTEXT_ROWS, CONTEXT, LANE_CONTEXT = 32, 2048, 512
HISTORY = 8192
IN_SERVICE = 1.15
"""Attention over KV takes so much longer in service than alone: caches are colder, and the card is warmer."""


def step_times(opened: Opened, decoding: dict[bool, dict[int, Replay]], total_pages: int) -> StepTimes:
    """Every table of `StepTimes`. The device is idle before and after; page tables and inputs are left as they were."""
    meter = _Meter(opened, decoding, total_pages)
    lone, beside = meter.decode(), meter.beside()
    context_ns, slowdown = meter.context()
    return StepTimes(
        decode=lone,
        beside=beside,
        mixed=meter.mixed(),
        lane=meter.lane(),
        context_ns=context_ns,
        beside_slowdown=slowdown,
        history=meter.history(),
    )


class _Meter:
    def __init__(self, opened: Opened, decoding: dict[bool, dict[int, Replay]], total_pages: int) -> None:
        self._opened = opened
        self._total_pages = total_pages
        self._rows = bucket_of(opened.row_buckets, min(CONTEXT_ROWS, opened.config.max_num_seqs))
        self._decoding = decoding
        self._primary: LaneWork = opened.lanes[Lane.PRIMARY]
        self._prefill: LaneWork = opened.lanes[Lane.PREFILL]
        self._heads: Heads = opened.heads
        self._stage_prompts()

    def _stage_prompts(self) -> None:
        """Chunks of different tokens: over equal ones a card draws less power, and is up to a tenth faster."""
        chance = np.random.default_rng(0)
        for work in (self._primary, self._prefill):
            with _cuda.stream(work.stream):
                fields = work.staging.begin()
                fields["ids"][:] = chance.integers(0, self._opened.model.vocab_size, len(fields["ids"]))
                work.staging.send(tokens=True)
            work.stream.synchronize()

    def _step(self, forward: Replay, rows: int) -> Callable[[], None]:
        """A forward and the drawing behind it."""

        def run() -> None:
            forward()
            self._heads.graphs[rows]()

        return run

    def _us(self, work: Callable[[], None], repeats: int = REPEATS) -> int:
        """Of work on the primary lane, the median, once it has run untimed."""
        times: list[float] = []
        with _cuda.stream(self._primary.stream):
            work()
            for _ in range(repeats):
                begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                work()
                end.record()
                end.synchronize()
                times.append(1e3 * begin.elapsed_time(end))
        return round(statistics.median(times))

    def decode(self) -> list[tuple[int, int]]:
        return [(rows, self._us(self._step(replay, rows))) for rows, replay in sorted(self._decoding[False].items())]

    def beside(self) -> list[tuple[int, int]]:
        """While a prefill runs on the lane."""
        out = []
        for rows, replay in sorted(self._decoding[True].items()):
            with self._prefilling():
                out.append((rows, self._us(self._step(replay, rows), 2)))
        return out

    def _prefilling(self) -> _Prefilling:
        tokens = bucket_of(self._opened.chunk_sizes[0], min(4096, self._opened.most_chunk_tokens))
        return _Prefilling(self._prefill, tokens)

    def mixed(self) -> list[tuple[int, int, int]]:
        out = []
        for rows, tokens in sorted(self._primary.ragged):
            if rows:
                self._plan(self._primary, 0, tokens)
                drawn = bucket_of(self._opened.row_buckets, rows)
                out.append((rows, tokens, self._us(self._step(self._primary.ragged[rows, tokens], drawn), 1)))
        return out

    def lane(self) -> list[tuple[int, int]]:
        """Alone on the partition, times what whole decode steps beside it make of a large one: they share memory."""
        sizes = [tokens for _, tokens in sorted(self._prefill.ragged)]
        alone = {tokens: self._prefill_us(tokens, beside=False) for tokens in sizes}
        probe = bucket_of(sizes, min(4096, sizes[-1]))
        with self._reading(LANE_CONTEXT):
            slowdown = self._prefill_us(probe, beside=True) / alone[probe]
        return [(tokens, round(us * max(1.0, slowdown))) for tokens, us in alone.items()]

    def _prefill_us(self, tokens: int, *, beside: bool) -> int:
        """A prefill on its lane, alone or beside decode steps."""
        self._plan(self._prefill, 0, tokens)
        began = time.perf_counter()
        with _cuda.stream(self._prefill.stream):
            self._prefill.ragged[0, tokens]()
        if beside:
            self._decode_beside()
        self._prefill.stream.synchronize()
        took = time.perf_counter() - began
        self._primary.stream.synchronize()
        return round(1e6 * took)

    def _decode_beside(self) -> None:
        """Steps until the prefill is done, two in flight: more, and the host would be held up until some have run."""
        step, ends = self._step(self._decoding[True][self._rows], self._rows), deque[Any]()
        with _cuda.stream(self._primary.stream):
            while not self._prefill.stream.query():
                if len(ends) == 2 and not ends[0].query():
                    continue
                step()
                ends.append(self._primary.stream.record_event())
                if len(ends) > 2:
                    ends.popleft()

    def context(self) -> tuple[float, float]:
        """(ns for each token of KV that decode attention reads, the same beside a prefill over it)."""
        without = self._both()
        with self._reading(CONTEXT) as tokens:
            within = self._both()
        lone, beside = (max(1, full - empty) for full, empty in zip(within, without, strict=True))
        return IN_SERVICE * 1e3 * lone / tokens, beside / lone

    def _both(self) -> tuple[int, int]:
        """A decode step alone and beside a prefill."""
        lone = self._us(self._step(self._decoding[False][self._rows], self._rows))
        with self._prefilling():
            return lone, self._us(self._step(self._decoding[True][self._rows], self._rows))

    @contextmanager
    def _reading(self, context: int) -> Iterator[int]:
        """Decode steps of `_rows` rows read so many tokens of KV each, or what there is; all of them together."""
        opened, rows = self._opened, self._rows
        pages = min(context // PAGE, self._total_pages // rows, opened.page_table.shape[1])
        table = torch.arange(rows * pages, dtype=torch.int32, device=opened.device)
        opened.page_table[:rows, :pages] = table.view(rows, pages)
        self._stage_rows(np.arange(rows), pages * PAGE - 1)
        _cuda.synchronize()
        yield rows * pages * PAGE
        opened.page_table.zero_()
        self._stage_rows(np.full(rows, -1), 0)
        _cuda.synchronize()

    def _stage_rows(self, slots: npt.NDArray[np.integer[Any]], position: int) -> None:
        """What decode graphs replay over from now on."""
        with _cuda.stream(self._primary.stream):
            fields = self._primary.staging.begin()
            fields["slots"][: len(slots)], fields["positions"][: len(slots)] = slots, position
            self._primary.staging.send(tokens=False)

    def history(self) -> list[tuple[int, float]]:
        """ns for each token of KV before a chunk of so many tokens: attention comes in tiles of them."""
        room = self._opened.page_table.shape[1] * PAGE
        out = []
        for rows, tokens in sorted(self._primary.ragged):
            if rows == 0:
                history = max(0, min(HISTORY, room - tokens))
                short, long = (self._chunk_us(start, tokens) for start in (0, history))
                out.append((tokens, IN_SERVICE * 1e3 * max(0, long - short) / max(1, history)))
        return out

    def _chunk_us(self, start: int, tokens: int) -> int:
        self._plan(self._primary, start, tokens)
        return self._us(self._primary.ragged[0, tokens], 1)

    def _plan(self, work: LaneWork, start: int, tokens: int) -> None:
        """A chunk that reads whatever lies in the KV; proven done, since its pinned memory serves the next plan too."""
        pages = (np.arange(-(-(start + tokens) // PAGE)) % self._total_pages).astype(np.int32)
        with _cuda.stream(work.stream):
            work.prefill.plan([start], [tokens], [pages], bucket=tokens)
        work.stream.synchronize()


class _Prefilling:
    """A prefill that runs on its lane until the block ends."""

    def __init__(self, work: LaneWork, tokens: int) -> None:
        self._work = work
        self._tokens = tokens

    def __enter__(self) -> None:
        with _cuda.stream(self._work.stream):
            pages = [np.zeros(-(-self._tokens // PAGE), np.int32)]
            self._work.prefill.plan([0], [self._tokens], pages, bucket=self._tokens)
            self._work.ragged[0, self._tokens]()

    def __exit__(self, *_: object) -> None:
        self._work.stream.synchronize()
