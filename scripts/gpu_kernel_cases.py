"""Inputs, capture and timing that the checks and the timings of the CUDA kernels share."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_core.ops.cuda.attention import Cut, DecodeAttention
from engine_core.ops.cuda.kernel import Kernels
from engine_core.ops.cuda.layer import EmbedLast, Heads, RopeAndStore, rope_table
from engine_core.ops.cuda.linear import Epilogue, LinearWeights, SkinnyLinear, Tile
from engine_core.ops.cuda.nvrtc import CodeCache, CudaKernels
from engine_core.ops.cuda.sampling import Sampler, SamplingTables

cuda: Any = torch.cuda  # its annotations are incomplete
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
PAGE = 16
EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    """A decoder's shape."""

    hidden: int
    intermediate: int
    heads: Heads
    layers: int
    vocabulary: int

    @property
    def qkv_rows(self) -> int:
        return self.heads.total * self.heads.head_dim

    @property
    def attention_width(self) -> int:
        return self.heads.query * self.heads.head_dim

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of a layer's matrices, in their order."""
        return (
            (self.qkv_rows, self.hidden),
            (self.hidden, self.attention_width),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )


QWEN3_4B = Shape(2560, 9728, Heads(32, 8, 128), 36, 151936)
QWEN3_06B = Shape(1024, 3072, Heads(16, 8, 128), 28, 151936)


def sms() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def make_kernels(cache: Path, *, overlap: bool = True) -> CudaKernels:
    torch.zeros(1, device=DEVICE)  # makes the context
    return CudaKernels(CodeCache(cache), lambda: torch.cuda.current_stream().cuda_stream, overlap=overlap)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE, dtype=BF16) * scale).contiguous()


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)


def integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The work as a graph, run once eagerly before."""
    stream = cuda.Stream()
    with cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph


def median_us(graph: torch.cuda.CUDAGraph, calls: int, repeats: int = 21) -> float:
    """Median time of one of the graph's `calls`, in microseconds."""
    for _ in range(3):
        graph.replay()
    events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events)) * 1e3 / calls


@dataclass
class Context:
    """Rows with their pages scattered over a pool."""

    slots: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor
    pools: list[torch.Tensor]


def make_context(
    heads: Heads, slots: list[int], lengths: list[int], table_slots: int, most: int, layers: int
) -> Context:
    """Rows at `slots` (-1: padding) whose newest token is the `lengths`-th; tables for contexts up to `most` tokens."""
    width = -(-most // PAGE)
    order = torch.randperm(table_slots * width, device=DEVICE).to(torch.int32)
    pools = [random(table_slots * width, 2, PAGE, heads.kv, heads.head_dim) for _ in range(layers)]
    return Context(integers(slots), integers([length - 1 for length in lengths]), order.view(table_slots, width), pools)


def angles(most: int, head_dim: int) -> torch.Tensor:
    """A rope table as Qwen3's."""
    frequencies = 1e6 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = torch.arange(most)[:, None] * frequencies
    return rope_table(turns.cos(), turns.sin()).to(DEVICE)


class Layer:
    """One decoder layer for up to 16 rows: six launches."""

    def __init__(self, shape: Shape, kernels: Kernels, tiles: dict[str, Tile] | None = None) -> None:
        chosen = tiles or {}
        norm = 1 + random(shape.hidden, scale=0.1)
        head_dim = shape.heads.head_dim
        self.norms = 1 + random(head_dim, scale=0.1), 1 + random(head_dim, scale=0.1)

        def weights(rows: int, columns: int) -> torch.Tensor:
            return random(rows, columns, scale=columns**-0.5)

        def linear(name: str, layer: LinearWeights) -> SkinnyLinear:
            return SkinnyLinear(layer, kernels, chosen.get(name))

        qkv = LinearWeights(weights(shape.qkv_rows, shape.hidden), norm=norm, epsilon=EPSILON)
        out = LinearWeights(weights(shape.hidden, shape.attention_width), Epilogue.ADD)
        gate_up = weights(2 * shape.intermediate, shape.hidden)
        gated = LinearWeights(gate_up, Epilogue.GATED, norm=norm, epsilon=EPSILON)
        down = LinearWeights(weights(shape.hidden, shape.intermediate), Epilogue.ADD)
        self.qkv, self.out = linear("qkv", qkv), linear("out", out)
        self.gate_up, self.down = linear("gate_up", gated), linear("down", down)


class Decoder:
    """A decode step of a whole model for up to 16 rows, embedding to drawn token, all on the device."""

    def __init__(
        self, shape: Shape, rows: int, context: Context, kernels: Kernels, *, layers: int, cut: Cut | None = None
    ) -> None:
        self.shape, self.context, heads = shape, context, shape.heads
        table_slots = context.page_table.shape[0]
        self.layers = [Layer(shape, kernels) for _ in range(layers)]
        self.embeddings = random(shape.vocabulary, shape.hidden)
        norm = 1 + random(shape.hidden, scale=0.1)
        head = LinearWeights(random(shape.vocabulary, shape.hidden, scale=0.05), norm=norm, epsilon=EPSILON, wide=True)
        self.head = SkinnyLinear(head, kernels)
        self.embed = EmbedLast(kernels)
        self.rope = RopeAndStore(heads, EPSILON, kernels, qk_norm=True)
        self.attention = DecodeAttention(heads, rows, sms(), DEVICE, kernels, cut)
        self.tables = SamplingTables(table_slots, shape.vocabulary, DEVICE)
        self.sampler = Sampler(self.tables, rows, kernels)
        self.angles = angles(context.page_table.shape[1] * PAGE, heads.head_dim)
        self.residual = poisoned(rows, shape.hidden)
        self.qkv = poisoned(rows, heads.total, heads.head_dim)
        self.attended = torch.zeros(rows, heads.query, heads.head_dim, device=DEVICE, dtype=BF16)
        self.gated = poisoned(rows, shape.intermediate)
        self.logits = poisoned(rows, shape.vocabulary, dtype=torch.float32)
        self.tokens = torch.full((rows,), -7, device=DEVICE, dtype=torch.int32)

    def step(self) -> None:
        context, heads = self.context, self.shape.heads
        rows = len(context.slots)
        self.embed(self.embeddings, self.tables.last_token, context.slots, self.residual)
        self.attention.plan(context.slots, context.positions)
        for number, layer in enumerate(self.layers):
            kv = context.pools[number % len(context.pools)]
            layer.qkv(self.residual, self.qkv.view(rows, -1))
            tables = context.positions, context.slots, context.page_table
            self.rope(self.qkv, layer.norms, self.angles, *tables, kv)
            self.attention(self.qkv, kv, context.page_table, self.attended, heads.head_dim**-0.5)
            layer.out(self.attended.view(rows, -1), self.residual, self.residual)
            layer.gate_up(self.residual, self.gated)
            layer.down(self.gated, self.residual, self.residual)
        self.head(self.residual, self.logits)
        self.sampler(self.logits, context.slots, context.positions, self.tokens)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was expected; NaN if any element is."""
    difference = (actual.float().cpu() - expected.float().cpu()).norm()
    return float(difference / expected.float().cpu().norm())


def page_lists(context: Context) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Each row's pages on the host."""
    return [context.page_table[int(slot)].cpu().numpy() for slot in context.slots]


Measured = dict[str, float]
BOUND = 4e-3
"""Of the relative error: bf16 results are within 2e-3 of the truth, those normed on the way within 3.5e-3."""


def near(measured: Measured, name: str, actual: torch.Tensor, expected: torch.Tensor, bound: float = BOUND) -> None:
    measured[name] = relative_error(actual, expected)
    assert measured[name] < bound, f"{name}: relative error {measured[name]:.2e}, bound {bound:.0e}"
