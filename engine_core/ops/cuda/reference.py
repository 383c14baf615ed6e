"""What the kernels compute, in plain torch and float32: the yardstick of tests and of scripts/gpu_kernels.py.

Inputs are taken as they are (bf16 values widened); nothing is rounded on the way. Slow and obvious on purpose.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from engine_core.ops.cuda.linear import Epilogue, LinearWeights
from engine_core.step import RowSampling


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., width] times weight [width] over the root mean square of x, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight.float()


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the last dimension times the second half."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.silu(gate) * up


def linear(layer: LinearWeights, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """What `SkinnyLinear` computes; float32 [tokens, outputs]."""
    rows = x.float() if layer.norm is None else rms_norm(x, layer.norm, layer.epsilon)
    y = rows @ layer.weight.float().T
    if layer.bias is not None:
        y = y + layer.bias.float()
    if layer.epilogue is Epilogue.GATED:
        return silu_mul(y)
    return y if residual is None else y + residual.float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, head_dim], halves paired; cos and sin [tokens, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def paged_attention(
    q: torch.Tensor, kv: torch.Tensor, pages: torch.Tensor, length: int, scale: float, start: int | None = None
) -> torch.Tensor:
    """Causal attention of one row's queries q [tokens, heads, head_dim] over `length` tokens of its pages.

    kv [pages, 2, page_size, kv_heads, head_dim]; the queries are the tokens start .. start+tokens-1 (default: the last
    ones). float32 [tokens, heads, head_dim].
    """
    tokens, heads, _ = q.shape
    page_size, kv_heads = kv.shape[2:4]
    used = kv[pages[: (length + page_size - 1) // page_size].long()].float()
    keys = used[:, 0].flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, dim=1)
    values = used[:, 1].flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    first = length - tokens if start is None else start
    seen = torch.arange(length, device=q.device) <= torch.arange(first, first + tokens, device=q.device)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def scores(logits: torch.Tensor, sampling: RowSampling, noise: torch.Tensor) -> torch.Tensor:
    """What the draw takes the largest of, float64 [vocabulary]; -inf where a filter leaves a candidate out.

    `logits` are already edited and penalized; `noise` is the candidates' Gumbel noise.
    """
    x = logits.double()
    if sampling.temperature == 0:
        return x
    x = x / sampling.temperature
    values, counts = torch.unique(x, return_counts=True)
    values, counts = values.flip(0), counts.flip(0)  # from the largest
    masses = counts * (values - values[0]).exp()
    kept = torch.ones_like(values, dtype=torch.bool)
    if sampling.top_k > 0:
        kept &= counts.cumsum(0) - counts < sampling.top_k
    mass = masses[kept].sum()
    if sampling.top_p < 1:
        kept &= masses.cumsum(0) - masses < sampling.top_p * mass
    if sampling.min_p > 0:
        kept &= (values - values[0]).exp() >= sampling.min_p
    return torch.where(x >= values[kept].min(), x + noise, -torch.inf)
