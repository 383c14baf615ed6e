"""The work of a CUDA worker: graph replays over persistent buffers, one staging copy a step.

Owns the graphs, their inputs and outputs, and which graph a batch takes: decode rows alone replay a decode graph of the
partition in force; anything with chunks replays a ragged graph of its lane, behind FlashInfer's plan; drawing replays a
head graph on the primary lane, of the partition in force, or of the whole card for a batch that joins. Orders nothing
between lanes: the runner does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_core.device.appended_pages import AppendedPages
from engine_core.device.base import Batch, PromptRows, Sampled
from engine_core.device.cuda.described import PinnedLogprobs, PinnedPrompt, describe, describe_prompt
from engine_core.device.cuda.graphs import bucket_of
from engine_core.device.cuda.masks import MaskStaging
from engine_core.device.cuda.rows import DeviceRows
from engine_core.device.cuda.staging import Staging
from engine_core.ops.cuda.decoder import CudaDecoder
from engine_core.ops.cuda.kernel import KernelError
from engine_core.ops.cuda.matmul import LaneMatmul
from engine_core.ops.cuda.prefill import PagedPrefill
from engine_core.ops.cuda.sampling import Sampler
from engine_core.step import Lane, RowStart

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete
Int32 = npt.NDArray[np.int32]
Replay = Callable[[], None]


class NonFiniteLogits(ArithmeticError):
    """A row's logits hold NaN or infinity, or its parameters leave nothing to draw."""


class Excursion:
    """Another stream than the primary lane's is torch's current one: `torch.cuda.stream` costs ten times as much."""

    def __init__(self, stream: Any, home: Any) -> None:
        self._stream = stream
        self._home = home

    def __enter__(self) -> None:
        _cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        _cuda.set_stream(self._home)


@dataclass(slots=True)
class LaneWork:
    """What one lane's ragged forwards need."""

    stream: Any
    """torch's view of the lane's stream."""
    current: AbstractContextManager[object]
    """Makes the stream torch's current one; nothing to do for the primary lane's, which always is."""
    staging: Staging
    prefill: PagedPrefill
    multiply: LaneMatmul
    residual: torch.Tensor
    """bf16 [most tokens, H]: what the last ragged forward left of its tokens (`forwards.ragged`)."""
    states: torch.Tensor
    """bf16 [rows, H]: its final states of the tokens that are drawn from; on the primary lane the head's input."""
    picked: list[torch.Tensor]
    """bf16 [rows, H] by ring slot: the rows that sample when the batch joins."""
    tokens: list[torch.Tensor]
    """Pinned int32 [rows] by ring slot."""
    ragged: dict[tuple[int, int], Replay] = field(default_factory=dict)
    """By bucket of decode rows (0: none) and bucket of chunks' tokens."""
    last_layer: dict[tuple[int, int], Replay] = field(default_factory=dict)
    """Of those that compute it for the tokens alone that are drawn from: what makes it up for all, eagerly."""
    logprobs: dict[int, PinnedLogprobs | None] = field(default_factory=dict)
    prompts: dict[int, list[PinnedPrompt]] = field(default_factory=dict)


@dataclass(slots=True)
class Heads:
    """The primary lane's drawing: static inputs, logits and drawn tokens."""

    rows: torch.Tensor
    """bf16 [rows, H]: what is turned into logits."""
    tokens: torch.Tensor
    """int32 [rows]."""
    graphs: dict[int | None, dict[int, Replay]] = field(default_factory=dict)
    """By partition, as decode graphs are, and bucket of rows."""


class CudaCompute:
    """See `device.base.Compute`. The primary lane's stream is torch's current one in the thread of all calls."""

    def __init__(
        self,
        *,
        decoder: CudaDecoder,
        sampler: Sampler,
        rows: DeviceRows,
        masks: MaskStaging,
        works: list[LaneWork],
        heads: Heads,
        decode: dict[int | None, dict[int, Replay]],
        row_buckets: list[int],
        chunk_sizes: dict[int, list[int]],
        lane_sizes: list[int],
        page_table: torch.Tensor,
        close: Callable[[], None],
    ) -> None:
        """`works`: the primary lane's, then the prefill lane's by partition. `decode[partition in force]`: the decode
        graphs by bucket of rows. `chunk_sizes`: buckets of chunks' tokens, by bucket of decode rows before them;
        `lane_sizes`: of prefill batches. `close` destroys streams and contexts."""
        self._decoder = decoder
        self._sampler = sampler
        self._rows = rows
        self._masks = masks
        self._works = works
        self.primary = works[0]
        self._heads = heads
        self._decode = decode
        self._row_buckets = row_buckets
        self._chunk_sizes = chunk_sizes
        self._lane_sizes = lane_sizes
        self._mixed_rows = sorted(rows for rows in chunk_sizes if rows)
        self._page_table = page_table
        self._close = close
        self._appended = AppendedPages()

    # ------------------------------ rows

    def start_row(self, start: RowStart, batch: Batch) -> None:
        with self._work(batch).current:
            self._rows.start(start)

    def end_rows(self, slots: list[int]) -> None:
        """`start_row` overwrites all that a slot holds."""
        self._appended.forget(slots)

    def append_pages(self, slots: Int32, columns: Int32, pages: Int32) -> None:
        self._appended.add(slots, columns, pages)

    def _stage_pages(self, fields: dict[str, npt.NDArray[Any]], room: int) -> None:
        """Pages appended since the last forward, as flat table targets; the unused rest goes to the scratch row."""
        width = self._page_table.shape[1]
        fields["targets"][:room] = (self._page_table.shape[0] - 1) * width
        fields["pages"][:room] = 0
        filled = 0
        for slots, columns, pages in self._appended:
            if filled + len(slots) > room:
                self._rows.append_pages(slots, columns, pages)
                continue
            end = filled + len(slots)
            fields["targets"][filled:end] = slots.astype(np.int64) * width + columns
            fields["pages"][filled:end] = pages
            filled = end
        self._appended.clear()

    def _work(self, batch: Batch) -> LaneWork:
        return self.primary if batch.lane is Lane.PRIMARY else self._works[1 + (batch.partition or 0)]

    # ------------------------------ forward

    def forward(self, batch: Batch, ring: int) -> None:
        if batch.lane is Lane.PRIMARY and batch.decode_rows == len(batch.slots):
            self._forward_decode(batch)
        else:
            self._forward_ragged(batch, ring)

    def _forward_decode(self, batch: Batch) -> None:
        rows = len(batch.slots)
        bucket = bucket_of(self._row_buckets, rows)
        staging = self.primary.staging
        fields = staging.begin()
        self._stage_pages(fields, bucket)
        fields["slots"][:rows], fields["slots"][rows:bucket] = batch.slots, -1
        fields["positions"][:rows], fields["positions"][rows:bucket] = batch.starts, 0
        self._stage_samples(fields, batch, bucket)
        staging.replay(self._decode[batch.partition][bucket], tokens=False)

    def _stage_samples(self, fields: dict[str, npt.NDArray[Any]], batch: Batch, bucket: int) -> None:
        """Slots that draw and the position of their newest token: the drawn one stands behind it."""
        count = len(batch.sample_rows)
        fields["sample_slots"][:count] = batch.slots[batch.sample_rows]
        fields["sample_slots"][count:bucket] = -1
        fields["sample_positions"][:count] = batch.sample_positions - 1
        fields["sample_positions"][count:bucket] = 0

    def _forward_ragged(self, batch: Batch, ring: int) -> None:
        lane, decode = self._work(batch), batch.decode_rows
        rows = bucket_of(self._mixed_rows, decode) if decode else 0
        sizes = self._chunk_sizes[rows] if batch.lane is Lane.PRIMARY else self._lane_sizes
        tokens = bucket_of(sizes, int(batch.lengths[decode:].sum()))
        fields = lane.staging.begin()
        with lane.current:
            ends = rows + np.cumsum(batch.lengths[decode:], dtype=np.int64)
            self._stage_tokens(fields, batch, rows, tokens, ends)
            starts, lengths = batch.starts[decode:].tolist(), batch.lengths[decode:].tolist()
            pages = list(batch.page_tables[batch.slots[decode:]])
            lane.prefill.plan(starts, lengths, pages, ring, bucket=tokens)
            lane.staging.replay(lane.ragged[rows, tokens], tokens=True)
            if batch.lane is not Lane.PRIMARY:
                lane.picked[ring].copy_(lane.states)
            if batch.prompt_logprobs and (rows, tokens) in lane.last_layer:
                lane.last_layer[rows, tokens]()
            lane.prompts[ring] = [
                self._describe_prompt(lane, int(ends[rows.row - decode] - batch.lengths[rows.row]), rows)
                for rows in batch.prompt_logprobs
            ]

    def _stage_tokens(
        self, fields: dict[str, npt.NDArray[Any]], batch: Batch, rows: int, tokens: int, ends: npt.NDArray[np.int64]
    ) -> None:
        """Inputs by token: `rows` of decode rows, whose ids (-1) are read on the device, then `tokens` of chunks."""
        decode, total = batch.decode_rows, int(ends[-1])
        slots, positions, ids = fields["token_slots"], fields["token_positions"], fields["ids"]
        slots[:decode], slots[decode:rows], slots[total : rows + tokens] = batch.slots[:decode], -1, -1
        positions[:decode], positions[decode:rows], positions[total : rows + tokens] = batch.starts[:decode], 0, 0
        ids[:rows], ids[rows:total], ids[total : rows + tokens] = -1, batch.ids, 0
        lengths = batch.lengths[decode:]
        slots[rows:total] = np.repeat(batch.slots[decode:], lengths)
        positions[rows:total] = np.arange(rows, total) + np.repeat(batch.starts[decode:] - (ends - lengths), lengths)
        sampled = batch.sample_rows[decode:] - decode
        picks = fields["picks"]
        picks[:decode], picks[decode : decode + len(sampled)] = np.arange(decode), ends[sampled] - 1
        picks[decode + len(sampled) :] = 0
        self._stage_samples(fields, batch, len(fields["sample_slots"]))
        if batch.lane is Lane.PRIMARY:
            self._stage_pages(fields, len(fields["pages"]))

    def _describe_prompt(self, lane: LaneWork, first: int, rows: PromptRows) -> PinnedPrompt:
        logits = partial(self._decoder.logits, multiply=lane.multiply)
        return describe_prompt(logits, lane.residual[first : first + len(rows.targets)], rows)

    # ------------------------------ drawing

    def sample(self, batch: Batch, ring: int) -> None:
        count = len(batch.sample_rows)
        lane = self._work(batch)
        lane.logprobs[ring] = None
        if count == 0:
            return
        bucket = bucket_of(self._row_buckets, count)
        if batch.lane is not Lane.PRIMARY:
            self._take_picked(batch, lane.picked[ring], bucket)
        self._masks.send(batch.masks)
        tops = self._rows.logprobs[batch.slots[batch.sample_rows]]
        if (tops >= 0).any():
            lane.logprobs[ring] = self._draw_described(bucket, tops)
        else:
            in_force = batch.partition if batch.lane is Lane.PRIMARY else None
            self._heads.graphs[in_force][bucket]()
        lane.tokens[ring][:count].copy_(self._heads.tokens[:count], non_blocking=True)

    def _take_picked(self, batch: Batch, picked: torch.Tensor, bucket: int) -> None:
        """Rows of a joined prefill become the head's input, on the primary lane."""
        fields = self.primary.staging.begin()
        self._stage_pages(fields, len(fields["pages"]))
        self._stage_samples(fields, batch, bucket)
        self.primary.staging.send(tokens=False)
        self._apply_pages()
        self._heads.rows[:bucket].copy_(picked[:bucket])

    def _apply_pages(self) -> None:
        staged = self.primary.staging.on_device
        self._page_table.view(-1).index_copy_(0, staged["targets"], staged["pages"])

    def _draw_described(self, bucket: int, tops: Int32) -> PinnedLogprobs:
        """Draw outside the graph, keeping the raw logits of the rows that want to know."""
        staged, heads = self.primary.staging.on_device, self._heads
        logits = self._decoder.logits(heads.rows[:bucket], self.primary.multiply)
        asked = np.flatnonzero(tops >= 0)
        index = torch.from_numpy(asked).pin_memory().to(logits.device, non_blocking=True)
        raw = logits[index]
        self._sampler(
            logits, staged["sample_slots"][:bucket], staged["sample_positions"][:bucket], heads.tokens[:bucket]
        )
        return describe(raw, heads.tokens[index], asked, tops[asked])

    def read(self, batch: Batch, ring: int) -> Sampled:
        lane = self._work(batch)
        tokens = lane.tokens[ring][: len(batch.sample_rows)].numpy().copy()
        if (tokens < 0).any():
            slots = batch.slots[batch.sample_rows][tokens < 0].tolist()
            raise NonFiniteLogits(f"the logits of the rows in slots {slots} leave nothing to draw (NaN or infinite)")
        described = lane.logprobs.pop(ring)
        prompts = [prompt.block() for prompt in lane.prompts.pop(ring, [])]
        return Sampled(tokens, None if described is None else described.block(), prompts)

    # ------------------------------ errors and the end

    def is_fatal(self, error: BaseException) -> bool:
        """Out of memory and plain Python errors are recoverable; anything else that CUDA says is not (rule O14)."""
        if isinstance(error, _cuda.OutOfMemoryError):
            return False
        return isinstance(error, KernelError | torch.AcceleratorError) or (
            isinstance(error, RuntimeError) and "cuda" in str(error).lower()
        )

    def close(self) -> None:
        """Graphs and buffers go before the streams: torch marks freed pinned memory on the streams that used it."""
        self._let_go()
        gc.collect()
        _cuda.synchronize()
        self._close()

    def _let_go(self) -> None:
        for work in self._works:
            work.staging.close()
        self._masks.close()
        self._works.clear()
        self._decode.clear()
        del self.primary, self._heads, self._rows, self._masks, self._sampler, self._decoder
