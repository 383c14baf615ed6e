"""Stream-K products and the kernels that add up their parts, against float32, and whether their launches may
overlap."""

from __future__ import annotations

import random as chance
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from engine_core.model_config import ModelConfig
from engine_core.ops.cuda import reference
from engine_core.ops.cuda.attention import DecodeAttention
from engine_core.ops.cuda.cublaslt import CublasLt
from engine_core.ops.cuda.decoder import CudaDecoder
from engine_core.ops.cuda.kernel import Kernels
from engine_core.ops.cuda.layer import AddRmsNorm, Heads, RopeAndStore, SiluMul
from engine_core.ops.cuda.matmul import Choices, LaneMatmul
from engine_core.ops.cuda.streamk import StreamKLinear
from scripts.gpu_kernel_cases import (
    BF16,
    DEVICE,
    EPSILON,
    QWEN3_4B,
    Measured,
    Shape,
    angles,
    capture,
    make_context,
    make_kernels,
    near,
    poisoned,
    random,
    sms,
)

SMS = (132, 88, 40)
"""Of the lanes whose deals are tried; the blocks of a larger one than the card take turns."""
ROWS = (1, 12, 16, 24, 32, 48, 64)
OVERLAPS = ((20, 132), (64, 132), (20, 88), (64, 88), (20, 48))
"""(rows, SMs)"""
LAYERS, MOST = 3, 2048
"""Of the model whose launches overlap; MOST tokens a row."""


def check_streamk(cache: Path) -> Measured:
    """Every shape and count of rows as replays over fresh inputs, each consumer of parts, and whole layers, for which
    launches that overlap must give what launches one after another give, bit for bit."""
    kernels, measured, shape = make_kernels(cache), Measured(), QWEN3_4B
    _check_residual(measured, kernels, shape)
    _check_gate(measured, kernels, shape)
    _check_head(measured, kernels, shape)
    for heads, biased in ((shape.heads, False), (Heads(14, 2, 64), True)):
        _check_rope(measured, kernels, heads, biased=biased)
    return measured | _check_overlap(cache)


def _check_residual(measured: Measured, kernels: Kernels, shape: Shape) -> None:
    norm = AddRmsNorm(shape.hidden, EPSILON, kernels)
    for columns in (shape.attention_width, shape.intermediate, 960):
        weight, by = random(shape.hidden, columns, scale=columns**-0.5), random(shape.hidden)
        linear, host = StreamKLinear(weight, kernels), weight.cpu().float()
        for rows in ROWS:
            for of_lane in SMS:
                x, residual, y = random(rows, columns), random(rows, shape.hidden), poisoned(rows, shape.hidden)

                def run(
                    linear: StreamKLinear = linear,
                    of_lane: int = of_lane,
                    rest: tuple[torch.Tensor, ...] = (residual, by, y),
                    x: torch.Tensor = x,
                ) -> None:
                    norm(linear(x, of_lane), *rest)

                graph = capture(run)
                x.copy_(random(*x.shape))
                residual.copy_(random(*residual.shape))
                y.fill_(torch.nan)
                total = (x.cpu().float() @ host.T + residual.cpu().float()).to(BF16)
                graph.replay()
                name = f"residual/{columns}/{rows}/{of_lane}"
                near(measured, name, residual, total)
                near(measured, f"{name}/norm", y, reference.rms_norm(total, by.cpu(), EPSILON))


def _check_gate(measured: Measured, kernels: Kernels, shape: Shape) -> None:
    silu_mul = SiluMul(kernels)
    weight = random(2 * shape.intermediate, shape.hidden, scale=0.02)
    linear, host = StreamKLinear(weight, kernels), weight.cpu().float()
    for rows in ROWS:
        for of_lane in SMS:
            x, y = random(rows, shape.hidden), poisoned(rows, shape.intermediate)
            silu_mul(linear(x, of_lane), y)
            near(measured, f"gate/{rows}/{of_lane}", y, reference.silu_mul(x.cpu().float() @ host.T))


def _check_head(measured: Measured, kernels: Kernels, shape: Shape) -> None:
    weight = random(20000, shape.hidden, scale=0.02)
    linear, host = StreamKLinear(weight, kernels, whole=True), weight.cpu().float()
    for rows in ROWS:
        for of_lane in SMS:
            x = random(rows, shape.hidden)
            near(measured, f"head/{rows}/{of_lane}", linear(x, of_lane).sums[0], x.cpu().float() @ host.T, 1e-4)


def _check_rope(measured: Measured, kernels: Kernels, heads: Heads, *, biased: bool) -> None:
    """Against the rope of the rounded sum, which has a check of its own: twice the rounding."""
    width, rows = heads.total * heads.head_dim, 12
    weight, x, bias = random(width, 896, scale=0.03), random(rows, 896), random(width) if biased else None
    context = make_context(heads, [*range(rows - 1), -1], [7 * row + 1 for row in range(rows)], rows, 1024, 1)
    norms, (kv,) = (random(heads.head_dim), random(heads.head_dim)), context.pools
    run = RopeAndStore(heads, EPSILON, kernels, qk_norm=True)
    rest = norms, angles(1024, heads.head_dim), context.positions, context.slots, context.page_table
    whole = x.cpu().float() @ weight.cpu().float().T + (0 if bias is None else bias.cpu().float())
    wanted, stored = whole.to(BF16).to(DEVICE).view(rows, heads.total, heads.head_dim), kv.clone()
    run(wanted, *rest, stored)
    for of_lane in SMS:
        queries, pages = poisoned(rows, heads.total, heads.head_dim), kv.clone()
        run(queries, *rest, pages, (StreamKLinear(weight, kernels)(x, of_lane), bias))
        live = slice(0, rows - 1)
        name = f"rope/{heads.query}x{heads.head_dim}/{of_lane}"
        near(measured, f"{name}/q", queries[live, : heads.query], wanted[live, : heads.query], 8e-3)
        written = (stored != kv).flatten(1).any(1)
        near(measured, f"{name}/kv", pages[written], stored[written], 8e-3)
        assert torch.equal(pages[~written], kv[~written]), "something else was written"
        assert bool(queries[-1].isnan().all()), "a padding row was touched"


def _check_overlap(cache: Path) -> Measured:
    """On the whole card and as on lanes of some of it, where products and attention are cut otherwise."""
    return {f"replays equal/{rows}/{of_lane}": _overlap(cache, rows, of_lane) for rows, of_lane in OVERLAPS}


class _Model:
    """Three layers and a head of 4B shape over rows of any contexts, decode attention between the products."""

    def __init__(self, cache: Path, rows: int, of_lane: int) -> None:
        self._sms = of_lane
        self.context = make_context(QWEN3_4B.heads, list(range(rows)), [1] * rows, rows, MOST, 1)
        self._kv = self.context.pools[0].expand(LAYERS, *self.context.pools[0].shape)
        self._parameters = _parameters(QWEN3_4B, LAYERS)
        self.tokens = random(rows, QWEN3_4B.hidden)
        self._multiply = LaneMatmul(CublasLt(sms()), Choices(cache / "none.json"), of_lane)

    def stepper(self, kernels: Kernels) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """What runs a step over `tokens`, and where it leaves states and logits."""
        shape, context, rows = QWEN3_4B, self.context, self.tokens.shape[0]
        config = SimpleNamespace(
            hidden_size=shape.hidden,
            num_layers=LAYERS,
            intermediate_size=shape.intermediate,
            rms_norm_eps=EPSILON,
            tied=True,
            qk_norm=True,
        )
        rope, table = angles(MOST, shape.heads.head_dim), context.page_table
        decoder = CudaDecoder(cast(ModelConfig, config), self._parameters, kernels, shape.heads, rope, table)
        attention = DecodeAttention(shape.heads, rows, self._sms, DEVICE, kernels)
        residual, out = self.tokens.clone(), list[torch.Tensor]()

        def attend(qkv: torch.Tensor, pool: torch.Tensor, attended: torch.Tensor) -> None:
            attention(qkv, pool, table, attended, shape.heads.head_dim**-0.5)

        def step() -> None:
            residual.copy_(self.tokens)
            attention.plan(context.slots, context.positions)
            rest = residual, context.slots, context.positions, self._kv, attend, self._multiply
            decoder.layers(*rest, fused=True, span=range(LAYERS))
            out[:] = [residual, decoder.logits(residual, self._multiply)]

        return step, out


def _overlap(cache: Path, rows: int, of_lane: int) -> float:
    model = _Model(cache, rows, of_lane)
    (overlapped, left), (ordered, right) = (
        model.stepper(make_kernels(cache, overlap=overlap)) for overlap in (True, False)
    )
    graph = capture(overlapped)
    for repeat in range(30):
        model.tokens.copy_(random(*model.tokens.shape))
        lengths = [chance.randrange(1, MOST) for _ in range(rows)]
        model.context.positions.copy_(torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
        for run in (graph.replay, ordered):
            run()
            torch.cuda.synchronize()
        for one, other in zip(left, right, strict=True):
            assert torch.equal(one, other), f"replay {repeat}: overlap changes the result"
            assert bool(one.isfinite().all())
    return 30.0


def _parameters(shape: Shape, layers: int) -> dict[str, torch.Tensor]:
    out = {"embedding": random(shape.vocabulary, shape.hidden, scale=0.02), "final_norm": 1 + random(shape.hidden)}
    for layer in range(layers):
        for name, (outputs, inputs) in zip(("qkv", "out", "gate_up", "down"), shape.products, strict=True):
            out[f"layers.{layer}.{name}.weight"] = random(outputs, inputs, scale=0.02)
        for name in ("input_norm", "post_norm"):
            out[f"layers.{layer}.{name}"] = 1 + random(shape.hidden, scale=0.1)
        for name in ("q_norm", "k_norm"):
            out[f"layers.{layer}.{name}"] = 1 + random(shape.heads.head_dim, scale=0.1)
    return out
