"""What this GPU's forwards take, measured at start over the captured graphs: what the lanes' policy predicts from.

Owns the measuring; `scheduling/policy.py` owns what follows from it. Decode rows have tokens of their own and a page
of context unless said: a row without a slot would be zeros all through the layers, for which a card draws little power,
and without any context attention would cost nothing. Times on the prefill lane come from the host's clock (its stream
may be of a Green Context, which takes no timing event, rule E2).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine_core.device.cuda.compute import Heads, LaneWork, Replay
from engine_core.device.cuda.forwards import Opened
from engine_core.device.cuda.graphs import bucket_of
from engine_core.ops.cuda.splits import PAGE
from engine_core.step import PartitionTimes, StepTimes

_cuda: Any = torch.cuda  # torch's annotations of streams and events are incomplete
REPEATS = 3
CONTEXT_ROWS, CONTEXT, LANE_CONTEXT = 32, 2048, 512
READING_ROWS = (16, 32, 64)
"""At which the reading of KV on a partition is measured, as far as there are so many."""
BESIDE_TOKENS = 2048
"""Of the prefill that decode steps are measured beside, as far as a batch may have so many."""
BESIDE_ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
"""And rows of those steps, as far as there are so many; the next larger speak for others."""
MOST_HISTORY_TOKENS = 512
"""Of chunks whose time behind a history is measured; larger ones take in proportion."""
HISTORY = 4096
IN_SERVICE = 1.15
"""A chunk's attention over its history was seen to take so much longer in service than alone, presumably for colder
caches."""


def step_times(opened: Opened, decoding: dict[int | None, dict[int, Replay]], total_pages: int) -> StepTimes:
    """Every table of `StepTimes`. The device is idle before and after; no slot has a page or a token then."""
    meter = _Meter(opened, decoding, total_pages)
    return StepTimes(
        decode=meter.decode(),
        mixed=meter.mixed(),
        partitions=[meter.partition(index) for index in range(len(opened.partitions))],
        context_ns=meter.context_ns(),
        history=meter.history(),
    )


class _Meter:
    def __init__(self, opened: Opened, decoding: dict[int | None, dict[int, Replay]], total_pages: int) -> None:
        self._opened = opened
        self._total_pages = total_pages
        self._rows = bucket_of(opened.row_buckets, min(CONTEXT_ROWS, opened.config.max_num_seqs))
        self._decoding = decoding
        self._primary: LaneWork = opened.primary
        self._heads: Heads = opened.heads
        self._growth: dict[int, float] = {}
        """By tokens of a prefill longer than the probe: how many times as long as that it took."""
        most = max(len(work.staging.on_device["ids"]) for work in opened.works)
        self._tokens = np.random.default_rng(0).integers(0, opened.model.vocab_size, most)
        """Different ones: steps in service took 7 to 12 % longer than over equal ones, presumably for the power that a
        card draws."""
        for work in opened.works:
            self._stage(work)

    def _step(self, forward: Replay, rows: int, partition: int | None = None) -> Callable[[], None]:
        """A forward and the drawing behind it."""
        draw = self._heads.graphs[partition][rows]

        def run() -> None:
            forward()
            draw()

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
        replays = sorted(self._decoding[None].items())
        with self._reading(replays[-1][0], PAGE):
            return [(rows, self._us(self._step(replay, rows))) for rows, replay in replays]

    def mixed(self) -> list[tuple[int, int, int]]:
        out, shapes = [], sorted(shape for shape in self._primary.ragged if shape[0])
        with self._reading(self._opened.row_buckets[-1], PAGE):
            for rows, tokens in shapes:
                self._plan(self._primary, 0, tokens)
                drawn = bucket_of(self._opened.row_buckets, rows)
                out.append((rows, tokens, self._us(self._step(self._primary.ragged[rows, tokens], drawn), 1)))
        return out

    def context_ns(self) -> float:
        """For each token of KV that decode attention reads."""
        step = self._decode_step(None, self._rows)
        with self._reading(self._rows, PAGE):
            short_us = self._us(step)
        with self._reading(self._rows, CONTEXT) as tokens:
            return _reading_ns(self._us(step) - short_us, self._rows, tokens)

    def _decode_step(self, partition: int | None, rows: int) -> Callable[[], None]:
        return self._step(self._decoding[partition][rows], rows, partition)

    def partition(self, index: int) -> PartitionTimes:
        """What decode and prefill take side by side, with that partition in force."""
        work, rows = self._opened.prefills[index], self._beside_rows()
        steps = {count: self._decode_step(index, count) for count in rows}
        with self._reading(rows[-1], PAGE):
            decode = self._beside(work, steps)
        few = [count for count in rows if count in READING_ROWS] or rows[-1:]
        with self._reading(few[-1], CONTEXT) as tokens:
            reading = self._beside(work, {count: steps[count] for count in few})
        return PartitionTimes(
            decode=list(decode.items()),
            prefill=self._prefill_times(work, self._decode_step(index, self._rows)),
            reading=[(count, _reading_ns(us - decode[count], count, tokens)) for count, us in reading.items()],
        )

    def _beside_rows(self) -> list[int]:
        rows = self._opened.row_buckets
        return [count for count in rows if count in BESIDE_ROWS or count == rows[-1]]

    def _beside(self, work: LaneWork, steps: dict[int, Callable[[], None]]) -> dict[int, int]:
        """Steps beside a prefill on its lane, as many beside one as it has time for."""
        probe, out = self._probe, {}
        for rows, step in steps.items():
            alone = True
            while alone:
                fresh = work.stream.query()
                if fresh:
                    self._plan(work, 0, probe)
                    self._launch(work, probe)
                out[rows] = self._us(step, 2)
                alone = work.stream.query() and not fresh
        work.stream.synchronize()
        return out

    @property
    def _probe(self) -> int:
        """Tokens of the prefill beside which steps are measured."""
        sizes = self._opened.lane_sizes
        return bucket_of(sizes, min(BESIDE_TOKENS, sizes[-1]))

    @staticmethod
    def _launch(work: LaneWork, tokens: int) -> None:
        """The planned prefill, on its lane."""
        with _cuda.stream(work.stream):
            work.ragged[0, tokens]()

    def _prefill_times(self, work: LaneWork, decode: Callable[[], None]) -> list[tuple[int, int]]:
        """Alone on the partition, times what whole decode steps beside it make of a large one: they share memory.

        Those that are longer than that one grow with their tokens as on the first partition.
        """
        sizes, probe = self._opened.lane_sizes, self._probe
        alone = {tokens: self._prefill_us(work, tokens, None) for tokens in sizes if tokens <= probe}
        if not self._growth:
            long = (tokens for tokens in sizes if tokens > probe)
            self._growth = {tokens: self._prefill_us(work, tokens, None) / alone[probe] for tokens in long}
        alone |= {tokens: round(alone[probe] * times) for tokens, times in self._growth.items()}
        with self._reading(self._rows, LANE_CONTEXT):
            slowdown = self._prefill_us(work, probe, decode) / alone[probe]
        return [(tokens, round(us * max(1.0, slowdown))) for tokens, us in alone.items()]

    def _prefill_us(self, work: LaneWork, tokens: int, decode: Callable[[], None] | None) -> int:
        """A prefill on its lane, alone or beside decode steps."""
        self._plan(work, 0, tokens)
        began = time.perf_counter()
        self._launch(work, tokens)
        if decode is not None:
            self._until_done(work, decode)
        work.stream.synchronize()
        took = time.perf_counter() - began
        self._primary.stream.synchronize()
        return round(1e6 * took)

    def _until_done(self, work: LaneWork, decode: Callable[[], None]) -> None:
        """Decode until the prefill is done, two steps in flight: more, and the host would wait for some to have run."""
        ends = deque[Any]()
        with _cuda.stream(self._primary.stream):
            while not work.stream.query():
                if len(ends) == 2 and not ends[0].query():
                    continue
                decode()
                ends.append(self._primary.stream.record_event())
                if len(ends) > 2:
                    ends.popleft()

    @contextmanager
    def _reading(self, rows: int, context: int) -> Iterator[int]:
        """Decode steps of up to so many rows read so many tokens of KV for each, or what there is: how many.

        Pages lie as rows that grow side by side take them; rows share them where there are fewer than rows.
        """
        opened = self._opened
        pages = max(1, min(context // PAGE, self._total_pages // rows, opened.page_table.shape[1]))
        table = torch.arange(rows * pages, dtype=torch.int32, device=opened.device) % self._total_pages
        opened.page_table[:rows, :pages] = table.view(pages, rows).T
        opened.tables.last_token[:rows] = torch.from_numpy(self._tokens[:rows])
        self._stage(self._primary, rows, pages * PAGE - 1)
        _cuda.synchronize()
        yield pages * PAGE
        opened.page_table.zero_()
        opened.tables.last_token.zero_()
        self._stage(self._primary)
        _cuda.synchronize()

    def _stage(self, work: LaneWork, rows: int = 0, position: int = 0) -> None:
        """What that lane's graphs replay over from now on: chunks of different tokens, and slots of so many rows."""
        with _cuda.stream(work.stream):
            fields = work.staging.begin()
            for slots, positions in (("slots", "positions"), ("token_slots", "token_positions")):
                fields[slots][:] = np.where((order := np.arange(len(fields[slots]))) < rows, order, -1)
                fields[positions][:] = position
            fields["ids"][:] = self._tokens[: len(fields["ids"])]
            work.staging.send(tokens=True)
        work.stream.synchronize()

    def history(self) -> list[tuple[int, float]]:
        """ns for each token of KV before a chunk of so many tokens: attention comes in tiles of them."""
        room = self._opened.page_table.shape[1] * PAGE
        out = []
        for rows, tokens in sorted(self._primary.ragged):
            if rows == 0 and tokens <= MOST_HISTORY_TOKENS:
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


def _reading_ns(more_us: int, rows: int, tokens: int) -> float:
    """Of each token of KV, where so many rows with so many tokens took so much longer than with a page."""
    return 1e3 * max(1, more_us) / (rows * max(1, tokens - PAGE))
