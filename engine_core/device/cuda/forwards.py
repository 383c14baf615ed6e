"""What the graphs of a CUDA worker do: decode, chunks with or without decode rows, drawing.

Owns the order of work over static buffers and device tables, as functions to be captured; `opening.py` captures them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_core.config import WorkerConfig
from engine_core.device.cuda.compute import Heads, LaneWork
from engine_core.device.cuda.graphs import Forward
from engine_core.device.driver import Driver
from engine_core.device.green import GreenPartition
from engine_core.device.lanes import LaneStream
from engine_core.model_config import ModelConfig
from engine_core.ops.cuda.attention import DecodeAttention
from engine_core.ops.cuda.cublaslt import CublasLt
from engine_core.ops.cuda.decoder import CudaDecoder, Drawn
from engine_core.ops.cuda.layer import Heads as HeadShape
from engine_core.ops.cuda.matmul import Choices, LaneMatmul, Multiply
from engine_core.ops.cuda.nvrtc import CudaKernels
from engine_core.ops.cuda.sampling import Sampler, SamplingTables
from engine_core.step import Lane


@dataclass(slots=True)
class Opened:
    """What exists before the KV cache does."""

    config: WorkerConfig
    model: ModelConfig
    shape: HeadShape
    device: torch.device
    driver: Driver
    streams: dict[Lane, LaneStream]
    partitions: list[GreenPartition]
    decoder: CudaDecoder
    kernels: CudaKernels
    page_table: torch.Tensor
    tables: SamplingTables
    sampler: Sampler
    works: list[LaneWork]
    """The primary lane's, then the prefill lane's by partition."""
    heads: Heads
    row_buckets: list[int]
    chunk_sizes: dict[int, list[int]]
    """Buckets of chunks' tokens by bucket of decode rows in the same forward; 0 rows: chunks alone."""
    lane_sizes: list[int]
    """Buckets of a prefill batch's tokens."""
    library: CublasLt
    choices: Choices
    sms: int

    @property
    def scale(self) -> float:
        return float(self.model.head_dim**-0.5)

    @property
    def most_tokens(self) -> int:
        """Of one forward, padding included."""
        return max(self.chunk_sizes) + self.most_chunk_tokens

    @property
    def most_chunk_tokens(self) -> int:
        return self.chunk_sizes[0][-1]

    @property
    def primary(self) -> LaneWork:
        return self.works[0]

    @property
    def prefills(self) -> list[LaneWork]:
        return self.works[1:]

    def multiply(self, sms: int) -> LaneMatmul:
        return LaneMatmul(self.library, self.choices, sms)

    def attention(self, sms: int) -> DecodeAttention:
        """Decode attention with workspaces of its own, for a lane of so many SMs."""
        return DecodeAttention(self.shape, self.row_buckets[-1], sms, self.device, self.kernels)


FEW_DRAWN = 4
"""A chunk of at least so many times as many tokens as rows may draw computes its last layer for those rows alone."""


def few_drawn(opened: Opened, tokens: int) -> bool:
    return tokens >= FEW_DRAWN * opened.row_buckets[-1]


def ragged(
    opened: Opened,
    work: LaneWork,
    rows: int,
    tokens: int,
    attention: DecodeAttention,
    drawing: DecodeAttention,
    kv: torch.Tensor,
) -> Forward:
    """A forward over `tokens` tokens of chunks, behind `rows` decode rows: 0 on the prefill lane.

    Leaves the final states of the tokens that are drawn from in `work.states`, and in `work.residual` those of all, or,
    with `few_drawn`, what came to the last layer (`last_layer`). `drawing`: attention of the tokens drawn from; it may
    be `attention`.
    """
    staged, total = work.staging.on_device, rows + tokens
    slots, positions, picks = staged["token_slots"][:total], staged["token_positions"][:total], staged["picks"]
    few, layers = few_drawn(opened, tokens), opened.model.num_layers

    def attend_drawn(queries: torch.Tensor, pool: torch.Tensor, out: torch.Tensor) -> None:
        drawing(queries, pool, opened.page_table, out, opened.scale)

    drawn = Drawn(
        picks,
        lambda: drawing.plan(staged["sample_slots"], staged["sample_positions"]),
        attend_drawn,
        work.states,
    )
    run_layers = _over_chunks(opened, work, rows, tokens, attention, kv)

    def run(depth: int) -> None:
        work.staging.copy_in_graph(tokens=True)
        ids = staged["ids"][:total]
        if work is opened.primary:
            opened.page_table.view(-1).index_copy_(0, staged["targets"], staged["pages"])
        if rows:
            attention.plan(slots[:rows], positions[:rows])
            ids = torch.where(ids < 0, opened.tables.last_token[slots.clamp(min=0)], ids)
        work.residual[:total].copy_(opened.decoder.embedding[ids])
        run_layers(range(depth), drawn if few else None)
        if not few:
            torch.index_select(work.residual, 0, picks, out=work.states)

    return Forward(run, layers, rehearsed=2 if few else 1)


def last_layer(
    opened: Opened, work: LaneWork, rows: int, tokens: int, attention: DecodeAttention, kv: torch.Tensor
) -> Callable[[], None]:
    """The last layer over all tokens, behind a forward of `few_drawn`: their final states are in `work.residual` then.

    Its KV is written once more, as it was.
    """
    staged, layers = work.staging.on_device, opened.model.num_layers
    run_layers = _over_chunks(opened, work, rows, tokens, attention, kv)

    def run() -> None:
        if rows:
            attention.plan(staged["token_slots"][:rows], staged["token_positions"][:rows])
        run_layers(range(layers - 1, layers), None)

    return run


def _over_chunks(
    opened: Opened, work: LaneWork, rows: int, tokens: int, attention: DecodeAttention, kv: torch.Tensor
) -> Callable[[range, Drawn | None], None]:
    """What runs layers over a lane's staged tokens."""
    staged, total = work.staging.on_device, rows + tokens
    slots, positions = staged["token_slots"][:total], staged["token_positions"][:total]

    def attend(qkv: torch.Tensor, pool: torch.Tensor, out: torch.Tensor) -> None:
        if rows:
            attention(qkv[:rows], pool, opened.page_table, out[:rows], opened.scale)
        work.prefill.run(qkv[rows:, : opened.shape.query], pool, out[rows:])

    def run(span: range, drawn: Drawn | None) -> None:
        residual, multiply = work.residual[:total], work.multiply
        opened.decoder.layers(residual, slots, positions, kv, attend, multiply, fused=False, span=span, drawn=drawn)

    return run


def decode(opened: Opened, bucket: int, attention: DecodeAttention, multiply: Multiply, kv: torch.Tensor) -> Forward:
    """One token for each of `bucket` rows; the rows' final states are left where the head reads them."""
    staging, rows = opened.primary.staging, opened.heads.rows[:bucket]
    staged = staging.on_device
    slots, positions = staged["slots"][:bucket], staged["positions"][:bucket]

    def attend(qkv: torch.Tensor, pool: torch.Tensor, out: torch.Tensor) -> None:
        attention(qkv, pool, opened.page_table, out, opened.scale)

    def run(depth: int) -> None:
        staging.copy_in_graph(tokens=False)
        opened.page_table.view(-1).index_copy_(0, staged["targets"][:bucket], staged["pages"][:bucket])
        opened.decoder.embed_last(opened.tables.last_token, slots, rows)
        attention.plan(slots, positions)
        opened.decoder.layers(rows, slots, positions, kv, attend, multiply, fused=True, span=range(depth))

    return Forward(run, opened.model.num_layers)


def head(opened: Opened, bucket: int, multiply: Multiply) -> Callable[[], None]:
    """Logits of the head's rows and a draw for each."""
    staged = opened.primary.staging.on_device
    slots, positions = staged["sample_slots"][:bucket], staged["sample_positions"][:bucket]

    def run() -> None:
        logits = opened.decoder.logits(opened.heads.rows[:bucket], multiply)
        opened.sampler(logits, slots, positions, opened.heads.tokens[:bucket])

    return run
