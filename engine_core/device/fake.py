"""A device that computes nothing real: its tokens are a hash of everything in the sequence's KV pages.

Owns `FakeCompute`, which announces every access to the clocks of a `FakeTable` (`fake_driver.py`): a page that is
reused, skipped or written too early changes the tokens or raises RaceDetected. `open_device` is `--device fake`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_core.config import WorkerConfig
from engine_core.device.appended_pages import AppendedPages
from engine_core.device.base import Batch, Device, Int32, LaneSizes, Sampled, no_room, page_budget
from engine_core.device.driver import Driver, Watch
from engine_core.device.fake_driver import HOST, Clocks, FakeTable, RaceDetected, Ticks
from engine_core.device.green import lane_sizes
from engine_core.device.streams import open_streams
from engine_core.model_config import load_model_config
from engine_core.ops.masks import allowed_ids
from engine_core.step import Lane, LogprobBlock, PartitionTimes, PromptLogprobBlock, RowStart, StepTimes


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), elementwise."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@functools.cache
def position_weights(count: int) -> npt.NDArray[np.uint64]:
    """[count] odd factors of the tokens at each position; shared, so not writable."""
    weights = _mix(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)
    weights.setflags(write=False)
    return weights


class FakeCompute:
    """Tokens from hashes of KV pages, on the streams of a FakeTable, every access announced to the clocks.

    KV at position p is KV at p-1 plus a weight of (p, token), mod 2^64; the next token is a hash of the KV at the
    sequence's end, from what a mask leaves. Sampling parameters have no influence; the distribution has one token of
    probability 1.
    """

    def __init__(
        self,
        table: FakeTable,
        streams: dict[Lane, Any],
        *,
        total_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        rings: int,
        whole_context: bool = True,
        partitions: Sequence[Any] = (),
    ) -> None:
        """`partitions`: the prefill lane's stream for each, if there are any. `whole_context`: announce every
        page that attention would read, at a cost that grows with the context; else only those whose contents the
        tokens come from."""
        self._table = table
        self._streams = streams
        self._partitions = partitions
        self._whole_context = whole_context
        self._page_size = page_size
        self._vocab = vocab_size
        self._kv = np.zeros((total_pages, page_size), np.uint64)
        self._weights = position_weights(max_model_len)
        self._last_token = np.zeros(max_num_seqs, np.int32)
        self._logprobs = np.full(max_num_seqs, -1, np.int32)
        self._hidden: dict[tuple[Lane, int], npt.NDArray[np.uint64]] = {}
        self._drawn: dict[tuple[Lane, int], Int32] = {}
        self._tops: dict[tuple[Lane, int], Int32] = {}
        self._pages = Clocks("page", total_pages)
        self._slots = Clocks("row of slot", max_num_seqs)
        """Its tables (pages, parameters) and its last token."""
        self._appended = AppendedPages()
        self._rings = {lane: Clocks(f"ring slot of lane {lane.name}", rings) for lane in Lane}

    def start_row(self, start: RowStart, batch: Batch) -> None:
        """Writes the slot's tables; each forward copies its rows', so there is nothing in the writing but its place in
        the order of things."""
        stream = self._stream(batch)
        self._slots.write(np.array([start.slot], np.int32), stream.thread, self._table.enqueue(stream, _nothing))
        self._logprobs[start.slot] = start.sampling.logprobs

    def end_rows(self, slots: list[int]) -> None:
        self._appended.forget(slots)

    def append_pages(self, slots: Int32, columns: Int32, pages: Int32) -> None:
        self._appended.add(slots, columns, pages)

    def _apply_pages(self, stream: Any, clock: Ticks) -> None:
        for slots, _, _ in self._appended:
            self._slots.write(slots, stream.thread, clock)
        self._appended.clear()

    def _stream(self, batch: Batch) -> Any:
        if batch.lane is Lane.PREFILL and self._partitions:
            return self._partitions[batch.partition or 0]
        return self._streams[batch.lane]

    def forward(self, batch: Batch, ring: int) -> None:
        """Reads the pages of the rows' contexts, writes those of the new positions."""
        stream, page = self._stream(batch), self._page_size
        first, last = batch.starts // page, (batch.starts + batch.lengths - 1) // page
        origin = np.zeros_like(first) if self._whole_context else np.maximum(batch.starts - 1, 0) // page
        columns = origin[:, None] + np.arange(int((last - origin).max()) + 1)
        table = batch.page_tables[batch.slots[:, None], np.minimum(columns, last[:, None])]
        clock = self._table.enqueue(stream, lambda: self._run_forward(batch, table, origin, ring))
        self._pages.read(table[columns <= last[:, None]], stream.thread, clock)
        self._pages.write(table[(columns >= first[:, None]) & (columns <= last[:, None])], stream.thread, clock)
        if batch.lane is Lane.PRIMARY:
            self._apply_pages(stream, clock)
        self._slots.read(batch.slots, stream.thread, clock)
        self._rings[batch.lane].write(np.array([ring], np.int32), stream.thread, clock)

    def _run_forward(self, batch: Batch, table: Int32, origin: Int32, ring: int) -> None:
        """Column c of `table` holds the pages at column origin + c of the rows' own tables."""
        decode, shift = batch.decode_rows, origin * self._page_size
        starts = batch.starts - shift
        tokens = self._last_token[batch.slots[:decode]]
        values = np.empty(len(batch.slots), np.uint64)
        values[:decode] = self._step_rows(batch.starts[:decode], starts[:decode], table[:decode], tokens)
        offset = 0
        for row in range(decode, len(batch.slots)):
            ids = batch.ids[offset : offset + int(batch.lengths[row])]
            values[row] = self._step_chunk(int(batch.starts[row]), int(starts[row]), table[row], ids)
            offset += len(ids)
        self._hidden[batch.lane, ring] = values[batch.sample_rows]

    def _step_rows(self, positions: Int32, places: Int32, table: Int32, tokens: Int32) -> npt.NDArray[np.uint64]:
        """One token a row at `positions`, which are `places` in the rows' part of the table."""
        rows, before = np.arange(len(positions)), np.maximum(places - 1, 0)
        values: npt.NDArray[np.uint64] = self._kv[table[rows, before // self._page_size], before % self._page_size]
        values = np.where(positions > 0, values, np.uint64(0))
        values = values + (tokens.astype(np.uint64) + np.uint64(1)) * self._weights[positions]
        self._kv[table[rows, places // self._page_size], places % self._page_size] = values
        return values

    def _step_chunk(self, start: int, place: int, pages: Int32, tokens: Int32) -> np.uint64:
        before = self._kv[pages[(place - 1) // self._page_size], (place - 1) % self._page_size] if start else 0
        values = (tokens.astype(np.uint64) + np.uint64(1)) * self._weights[start : start + len(tokens)]
        values = np.cumsum(values, dtype=np.uint64) + np.uint64(before)
        places = np.arange(place, place + len(tokens))
        self._kv[pages[places // self._page_size], places % self._page_size] = values
        return np.uint64(values[-1])

    def sample(self, batch: Batch, ring: int) -> None:
        stream = self._streams[Lane.PRIMARY]
        self._tops[batch.lane, ring] = self._logprobs[batch.slots[batch.sample_rows]]
        clock = self._table.enqueue(stream, lambda: self._run_sample(batch, ring))
        self._rings[batch.lane].write(np.array([ring], np.int32), stream.thread, clock)
        self._apply_pages(stream, clock)
        self._slots.write(batch.slots[batch.sample_rows], stream.thread, clock)

    def _run_sample(self, batch: Batch, ring: int) -> None:
        values = _mix(self._hidden[batch.lane, ring])
        drawn = (values % np.uint64(self._vocab)).astype(np.int32)
        for mask in batch.masks:
            allowed = np.flatnonzero(allowed_ids(mask.words, self._vocab))
            drawn[mask.row] = allowed[int(values[mask.row]) % len(allowed)]
        self._last_token[batch.slots[batch.sample_rows]] = drawn
        self._drawn[batch.lane, ring] = drawn

    def read(self, batch: Batch, ring: int) -> Sampled:
        self._rings[batch.lane].read(np.array([ring], np.int32), HOST, self._table.host_tick())
        tokens = self._drawn[batch.lane, ring]
        tops = self._tops[batch.lane, ring]
        asked = np.flatnonzero(tops >= 0).astype(np.uint32)
        block = None if len(asked) == 0 else _certain(asked, tokens[asked], tops)
        prompts = [
            PromptLogprobBlock(
                rows.slot,
                rows.start + 1,
                np.zeros(len(rows.targets), np.float32).tobytes(),
                np.ones(len(rows.targets), np.int32).tobytes(),
                min(rows.top, 1),
                rows.targets.tobytes() if rows.top else b"",
                np.zeros(len(rows.targets) if rows.top else 0, np.float32).tobytes(),
            )
            for rows in batch.prompt_logprobs
        ]
        return Sampled(tokens, block, prompts)

    def is_fatal(self, error: BaseException) -> bool:
        return isinstance(error, RaceDetected)

    def close(self) -> None:
        self._kv = np.zeros((0, self._page_size), np.uint64)


def _nothing() -> None:
    """An operation whose place in the order is all that counts."""


def _certain(rows: npt.NDArray[np.uint32], tokens: Int32, tops: Int32) -> LogprobBlock:
    """Logprobs of a distribution whose only token was drawn."""
    counts = np.minimum(tops[rows], 1).astype(np.uint32)
    return LogprobBlock(
        rows=rows.tobytes(),
        sampled=np.zeros(len(rows), np.float32).tobytes(),
        ranks=np.ones(len(rows), np.int32).tobytes(),
        counts=counts.tobytes(),
        top_ids=tokens[counts > 0].tobytes(),
        top_logprobs=np.zeros(int(counts.sum()), np.float32).tobytes(),
    )


def open_device(config: WorkerConfig, watch: Watch, progress: Callable[[str, int, int], None]) -> Device:
    """The fake device for a real model's shape on a simulated GPU: no weights are read, all work runs at once."""
    return open_on(FakeTable(), config, watch, progress)


def open_on(table: FakeTable, config: WorkerConfig, watch: Watch, progress: Callable[[str, int, int], None]) -> Device:
    """The fake device on a simulated GPU that the caller scripts."""
    model = load_model_config(Path(config.model))
    pages, max_model_len = page_budget(config, model, item_bytes=4)
    driver = Driver(table, watch)
    streams, partitions = open_streams(driver, config.decode_overlap, config.decode_sms, ExitStack())
    try:
        compute = FakeCompute(
            table,
            {lane: target.stream for lane, target in streams.items()},
            total_pages=pages,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            rings=config.async_depth + 1,
            whole_context=False,
            partitions=[partition.prefill.stream for partition in partitions],
        )
    except (MemoryError, ValueError) as error:  # of numpy, by how much too many there are
        raise no_room(pages, error) from error
    progress("fake model", 1, 1)
    return Device(
        driver=driver,
        streams=streams,
        compute=compute,
        vocab_size=model.vocab_size,
        total_pages=pages,
        max_model_len=max_model_len,
        dtype="float32",
        name="fake",
        lanes=lane_sizes(partitions) if partitions else LaneSizes(),
        partitions=[partition.prefill for partition in partitions],
        times=pretended_times(config.max_num_seqs, len(partitions)) if config.decode_overlap == "auto" else None,
    )


def pretended_times(rows: int, partitions: int = 1) -> StepTimes:
    """Of a GPU on which a chunk costs 20 us a token beside decode, and 30 us on its share of the first partition."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if size < rows] + [rows]
    tokens = (32, 64, 128, 256, 512, 1024, 2048)
    return StepTimes(
        decode=[(size, 3000 + 10 * size) for size in sizes],
        mixed=[(size, count, 3200 + 10 * size + 20 * count) for size in sizes for count in tokens],
        partitions=[
            PartitionTimes(
                decode=[(size, decode + 15 * size) for size in sizes],
                prefill=[(count, 2000 + each * count) for count in (*tokens, 4096, 8192)],
                reading=[(16, 70.0), (rows, 50.0)],
            )
            for decode, each in ((4500, 30), (4000, 36), (3700, 42), (3500, 50), (3400, 60))[:partitions]
        ],
        context_ns=35.0,
        history=[(count, float(count)) for count in tokens],
    )
