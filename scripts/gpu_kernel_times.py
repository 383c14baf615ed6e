"""How fast the CUDA kernels are: graph replays timed with events, medians, inputs larger than the L2 cache.

Each function returns rows for a table; rates count the bytes that must be read or the operations that must be done.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import flashinfer
import numpy as np
import torch
from torch.nn import functional

from engine_core.ops.cuda import linear as linear_module
from engine_core.ops.cuda.attention import Cut, DecodeAttention
from engine_core.ops.cuda.cublaslt import Algorithm, CublasLt, Problem, Product
from engine_core.ops.cuda.flashinfer_kernel import paged_run
from engine_core.ops.cuda.layer import AddRmsNorm, RopeAndStore, SiluMul
from engine_core.ops.cuda.linear import Epilogue, LinearWeights, SkinnyLinear, Tile
from engine_core.ops.cuda.nvrtc import CudaKernels
from engine_core.ops.cuda.prefill import LaneSms, PagedPrefill, PrefillLimits
from engine_core.ops.cuda.sampling import Sampler, SamplingTables, encode_row
from engine_core.ops.cuda.streamk import StreamKLinear
from engine_core.ops.masks import mask_size
from engine_core.step import RowSampling
from scripts.gpu_kernel_cases import (
    BF16,
    DEVICE,
    EPSILON,
    QWEN3_06B,
    QWEN3_4B,
    Context,
    Decoder,
    Shape,
    angles,
    capture,
    integers,
    make_context,
    make_kernels,
    median_us,
    page_lists,
    poisoned,
    random,
    sms,
)
from scripts.gpu_lane_times import time_lanes

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete
Row = dict[str, float | int | str]
COPIES = 6
"""Sets of weights that the timed calls take turns at."""
TILES = [
    *(Tile(w, r, d) for w, r, d in itertools.product((4, 8, 16), (1, 2), (1, 2, 3, 4, 6)) if w * r * d <= 48),
    *(Tile(w, 4, d, 1) for w, d in ((4, 1), (4, 2), (8, 1))),
]


def layers_4b() -> dict[str, Callable[[], LinearWeights]]:
    shape = QWEN3_4B

    def normed(rows: int, epilogue: Epilogue = Epilogue.PLAIN) -> LinearWeights:
        return LinearWeights(random(rows, shape.hidden, scale=0.02), epilogue, random(shape.hidden), EPSILON)

    return {
        "qkv": lambda: normed(shape.qkv_rows),
        "out": lambda: LinearWeights(random(shape.hidden, shape.attention_width), Epilogue.ADD),
        "gate_up": lambda: normed(2 * shape.intermediate, Epilogue.GATED),
        "down": lambda: LinearWeights(random(shape.hidden, shape.intermediate), Epilogue.ADD),
    }


def time_linear(cache: Path) -> Iterable[Row]:
    kernels = make_kernels(cache)
    for name, make in layers_4b().items():
        layers = [make() for _ in range(COPIES)]
        kernels.prepare(
            [linear_module.kernel(layers[0], tokens, tile) for tokens in (1, 8, 16) for tile in TILES], threads=16
        )
        for tokens in (1, 2, 4, 8, 16):
            timed = [(_linear_us(layers, tokens, kernels, tile), tile) for tile in TILES]
            best_us, best = min(timed, key=lambda pair: pair[0])
            default_us = _linear_us(layers, tokens, kernels, None)
            size = layers[0].weight.numel() * 2
            yield {
                "kernel": f"{name} x{tokens}",
                "us": default_us,
                "TB/s": size / default_us / 1e6,
                "cuBLAS us": _cublas_us(layers, tokens),
                "best us": best_us,
                "best TB/s": size / best_us / 1e6,
                "best": name_of(best),
                "next": " ".join(
                    f"{name_of(tile)}:{us:.2f}" for us, tile in sorted(timed, key=lambda pair: pair[0])[1:4]
                ),
            }


def name_of(tile: Tile) -> str:
    return f"{tile.warps}/{tile.row_tiles}/{tile.depth}/{tile.ahead}"


def _linear_us(layers: list[LinearWeights], tokens: int, kernels: CudaKernels, tile: Tile | None) -> float:
    linears = [SkinnyLinear(layer, kernels, tile) for layer in layers]
    x, y = random(tokens, layers[0].weight.shape[1]), random(tokens, layers[0].outputs)
    residual = y if layers[0].epilogue is Epilogue.ADD else None

    def work() -> None:
        for linear in linears:
            linear(x, y, residual)

    return median_us(capture(work), len(linears), repeats=15)


def _cublas_us(layers: list[LinearWeights], tokens: int) -> float:
    """The matrix product alone: no norm, no gate, no add."""
    x = random(tokens, layers[0].weight.shape[1])

    def work() -> None:
        for layer in layers:
            functional.linear(x, layer.weight)

    return median_us(capture(work), len(layers), repeats=15)


MATMUL_ROWS = (16, 64, 128, 192, 256, 272, 320, 384, 512, 576, 640, 1024, 2048)


STREAMED_ROWS = (12, 16, 24, 32, 48, 64)


def time_matmul(_: Path) -> Iterable[Row]:
    """A 4B layer's four products: torch's choice of algorithm, and the best of what cuBLASLt proposes."""
    torch.zeros(1, device=DEVICE)  # makes the context
    library, weights = CublasLt(sms()), _weights_4b()
    for rows in MATMUL_ROWS:
        favourite = 0.0
        for layers in weights:
            x = random(rows, layers[0].shape[1])
            favourite += _products_us(layers, partial(functional.linear, x))
        yield {"kernel": f"layer's products x{rows}", "torch us": favourite, "us": _best_us(library, weights, rows)}


def time_streamk(cache: Path) -> Iterable[Row]:
    """The same products: parts alone, not added up, and the best of what cuBLASLt proposes."""
    kernels, library, weights = make_kernels(cache), CublasLt(sms()), _weights_4b()
    size = 2 * sum(layers[0].numel() for layers in weights)
    for rows in STREAMED_ROWS:
        us = 0.0
        for layers in weights:
            linears = {id(weight): StreamKLinear(weight, kernels) for weight in layers}
            us += _products_us(layers, partial(_stream, linears, random(rows, layers[0].shape[1])))
        best_us = _best_us(library, weights, rows)
        yield {"kernel": f"layer's products x{rows}", "us": us, "TB/s": size / us / 1e6, "cuBLASLt us": best_us}


def _weights_4b() -> list[list[torch.Tensor]]:
    """A layer's four matrices, each in copies that the timed calls take turns at."""
    return [[random(*size, scale=0.02) for _ in range(COPIES)] for size in QWEN3_4B.products]


def _best_us(library: CublasLt, weights: list[list[torch.Tensor]], rows: int) -> float:
    """All products, each by the fastest of cuBLASLt's proposals."""
    total = 0.0
    for layers in weights:
        outputs, inputs = layers[0].shape
        problem, x = library.problem(Product(rows, outputs, inputs, sms())), random(rows, inputs)
        ways = problem.proposals()
        total += min(_products_us(layers, partial(_launch, problem, way, x)) for way in ways)
    return total


def _stream(linears: dict[int, StreamKLinear], x: torch.Tensor, weight: torch.Tensor) -> None:
    linears[id(weight)](x, sms())


def _launch(problem: Problem, way: Algorithm, x: torch.Tensor, weight: torch.Tensor) -> None:
    problem.launch(way, x, weight, None)


def _products_us(layers: list[torch.Tensor], product: Callable[[torch.Tensor], object]) -> float:
    """Of one product, over the copies of its matrix."""

    def work() -> None:
        for weight in layers:
            product(weight)

    return median_us(capture(work), len(layers), repeats=9)


LOADS = ((1, 1024), (1, 16384), (16, 1024), (64, 1024), (128, 2048), (4, 16384))


def time_attention(cache: Path) -> Iterable[Row]:
    kernels, heads = make_kernels(cache), QWEN3_4B.heads
    for rows, length in LOADS:
        size = rows * length * 2 * heads.kv * heads.head_dim * 2
        layers = max(1, min(24, (400 << 20) // size))
        context = make_context(heads, list(range(rows)), [length] * rows, rows, length, layers)
        yield {
            "kernel": f"decode attention {rows} x {length}",
            "us": (us := _attention_us(context, kernels, None)),
            "TB/s": size / us / 1e6,
            "FlashInfer us": (peer := _flashinfer_us(context, length)),
            "FlashInfer TB/s": size / peer / 1e6,
            **{
                f"{cut.warps}w {cut.blocks_per_sm}b {cut.stages}s us": _attention_us(context, kernels, cut)
                for cut in (Cut(2, 3), Cut(2, 4), Cut(2, 3, 4), Cut(4, 2), Cut(4, 2, 2), Cut(8, 1), Cut(8, 1, 2))
            },
        }


def _attention_us(context: Context, kernels: CudaKernels, cut: Cut | None) -> float:
    heads, rows = QWEN3_4B.heads, len(context.slots)
    attention = DecodeAttention(heads, rows, sms(), DEVICE, kernels, cut)
    qkv, out = random(rows, heads.total, heads.head_dim), poisoned(rows, heads.query, heads.head_dim)
    attention.plan(context.slots, context.positions)

    def work() -> None:
        for kv in context.pools:
            attention(qkv, kv, context.page_table, out, heads.head_dim**-0.5)

    return median_us(capture(work), len(context.pools))


def _flashinfer_us(context: Context, length: int) -> float:
    """FlashInfer's tensor-core decode, planned beforehand."""
    heads, rows = QWEN3_4B.heads, len(context.slots)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    pages = -(-length // heads.page_size)
    ends = torch.arange(0, rows * pages + 1, pages, dtype=torch.int32)
    last = torch.full((rows,), (length - 1) % heads.page_size + 1, dtype=torch.int32)
    shape = heads.query, heads.kv, heads.head_dim, heads.page_size
    ids = context.page_table[:, :pages].flatten()
    wrapper.plan(ends, ids, last, *shape, q_data_type=BF16, kv_data_type=BF16)
    q, out = random(rows, heads.query, heads.head_dim), poisoned(rows, heads.query, heads.head_dim)

    def work() -> None:
        for kv in context.pools:
            wrapper.run(q, kv, out=out)

    return median_us(capture(work), len(context.pools))


def time_layer(cache: Path) -> Iterable[Row]:
    kernels, shape = make_kernels(cache), QWEN3_4B
    heads, copies = shape.heads, 16
    for rows in (1, 64, 2048):
        context = make_context(heads, [0] * rows, list(range(1, rows + 1)), 1, 4096, 1)
        (x, residual, y), weight = (random(rows, shape.hidden) for _ in range(3)), random(shape.hidden)
        gate_up, gated = random(rows, 2 * shape.intermediate), random(rows, shape.intermediate)
        qkv, rope = random(rows, heads.total, heads.head_dim), angles(4096, heads.head_dim)
        norm, gate = AddRmsNorm(shape.hidden, EPSILON, kernels), SiluMul(kernels)
        store = RopeAndStore(heads, EPSILON, kernels, qk_norm=True)
        norms, tables = (random(128), random(128)), (context.positions, context.slots, context.page_table)
        works: dict[str, Callable[[], None]] = {
            "add + norm": partial(norm, x, residual, weight, y),
            "silu * up": partial(gate, gate_up, gated),
            "rope + store": partial(store, qkv, norms, rope, *tables, context.pools[0]),
        }
        for name, work in works.items():
            yield {"kernel": f"{name} x{rows}", "us": median_us(capture(in_turn(*[work] * copies)), copies)}


def in_turn(*works: Callable[[], object]) -> Callable[[], None]:
    def all_of_them() -> None:
        for work in works:
            work()

    return all_of_them


MIXES = {
    "greedy": RowSampling(temperature=0.0),
    "temperature": RowSampling(temperature=1.0),
    "top-k 20, top-p 0.95": RowSampling(temperature=0.6, top_k=20, top_p=0.95),
    "top-p 0.9": RowSampling(temperature=1.0, top_p=0.9),
    "flat, top-p 0.999": RowSampling(temperature=5.0, top_p=0.999),
    "penalties": RowSampling(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
}


MASKED = 1e-3
"""Share of the candidates that a mask leaves."""


def time_sampling(cache: Path) -> Iterable[Row]:
    kernels, vocabulary = make_kernels(cache), QWEN3_4B.vocabulary
    for rows in (1, 16, 64):
        tables = SamplingTables(rows, vocabulary, DEVICE)
        sampler = Sampler(tables, rows, kernels)
        logits = torch.randn(rows, vocabulary, device=DEVICE) * 2.5
        logits[:, :200] += torch.rand(rows, 200, device=DEVICE) * 12  # a head above the bulk, as a trained model has
        scratch, tokens = torch.empty_like(logits), integers([0] * rows)
        slots, positions = integers(list(range(rows))), integers([100] * rows)

        refill = partial(scratch.copy_, logits)
        draw = partial(sampler, scratch, slots, positions, tokens)
        bits = np.random.default_rng(rows).random((rows, 32 * mask_size(vocabulary))) < MASKED
        words = np.packbits(bits, bitorder="little").view("<i4")
        masks = torch.from_numpy(np.concatenate((np.arange(rows, dtype="<i4"), words)))
        copying, graph = median_us(capture(refill), 1), capture(in_turn(refill, draw))
        for name, sampling in MIXES.items():
            for slot in range(rows):
                tables.put(slot, encode_row(sampling, 10))
            yield {"kernel": f"sampling x{rows}, {name}", "us": median_us(graph, 1) - copying}
            sampler.masks.copy_(masks)
            yield {"kernel": f"sampling x{rows}, {name}, masked", "us": median_us(graph, 1) - copying}
            sampler.masks.fill_(-1)


def time_prefill(cache: Path) -> Iterable[Row]:
    heads = QWEN3_4B.heads
    context = make_context(heads, [0], [1], 1, 16384, 1)
    pages, (kv,) = page_lists(context), context.pools
    chunks = ((0, 240), (4096, 64), (4096, 128), (4096, 240), (8192, 240), (0, 512), (0, 2048), (0, 4096), (8192, 2048))
    for start, length in chunks:
        for cut, branch in (("whole", None), ("cut", _cuda.Stream())):
            limits, lane = PrefillLimits(4, length, 1024), LaneSms(sms(), sms())
            kernels, run = make_kernels(cache), paged_run(heads.head_dim, cache)
            prefill = PagedPrefill(heads, limits, heads.head_dim**-0.5, lane, kernels, run, DEVICE, branch=branch)
            plan_us = []
            for _ in range(10):
                torch.cuda.synchronize()
                before = time.perf_counter()
                prefill.plan([start], [length], pages, bucket=length)
                plan_us.append((time.perf_counter() - before) * 1e6)
            q, out = random(length, heads.query, heads.head_dim), poisoned(length, heads.query, heads.head_dim)
            us = median_us(capture(partial(prefill.run, q, kv, out)), 1)
            operations = 4 * heads.query * heads.head_dim * length * (start + length / 2)
            yield {
                "kernel": f"prefill {length} after {start}, {cut}",
                "us": us,
                "TFLOP/s": operations / us / 1e6,
                "plan us": sorted(plan_us)[5],
            }


def time_step(cache: Path) -> Iterable[Row]:
    for name, shape, loads in (("4B", QWEN3_4B, (1, 4, 8, 16)), ("0.6B", QWEN3_06B, (1, 16))):
        for rows in loads:
            row: Row = {"kernel": f"{name} decode step x{rows}, context 1024"}
            context = make_context(shape.heads, list(range(rows)), [1024] * rows, rows, 2048, shape.layers)
            for label, overlap in (("us", True), ("without overlap us", False)):
                decoder = Decoder(shape, rows, context, make_kernels(cache, overlap=overlap), layers=shape.layers)
                row[label] = median_us(capture(decoder.step), 1)
            row["floor us"] = step_bytes(shape, rows, 1024) / 4.2e6
            yield row


def step_bytes(shape: Shape, rows: int, length: int) -> int:
    """Weights and KV that a decode step must read."""
    heads = shape.heads
    of_layer = shape.hidden * (shape.qkv_rows + shape.attention_width + 3 * shape.intermediate)
    kv = rows * length * 2 * heads.kv * heads.head_dim * shape.layers
    return 2 * (shape.layers * of_layer + shape.vocabulary * shape.hidden + kv)


TIMES: dict[str, Callable[[Path], Iterable[Row]]] = {
    "step": time_step,
    "linear": time_linear,
    "streamk": time_streamk,
    "matmul": time_matmul,
    "attention": time_attention,
    "sampling": time_sampling,
    "layer": time_layer,
    "prefill": time_prefill,
    "lanes": time_lanes,
}
