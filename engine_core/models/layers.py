"""The parts of a decoder layer: what a projection and an element-wise step do, and the rotary tables.

Owns the seam at which a device brings its own kernels: `DecoderOps` lists every computation of a layer other than
attention, `TorchOps` is the plain torch version that any device can run. Holds no weights and knows no architecture.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine_core.model_config import RopeConfig
from engine_core.ops.panels import Projection, cpu_projection


class Rotation:
    """Cosines and sines of one forward's positions, ready to be multiplied in: both [T, 1, D]."""

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin


class AttentionOp(Protocol):
    """Attention of one forward over whatever holds its keys and values."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v [T, Hkv, D] of this layer, then attend with q [T, Hq, D]; returns [T, Hq * D].

        Inputs may be strided views; heads and head dimension are contiguous within a token.
        """


class DecoderOps(Protocol):
    """Everything in a decoder layer but attention. A device with fused kernels implements this."""

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        """A linear layer over weight [out, in] in whatever form the device multiplies fastest."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] normalized over its last dimension, times weight."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to the residual in place and return the normalized sum, times weight."""

    def rotate(self, qk: Tensor, norm: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
        """Queries and keys [T, Hq + Hkv, D], normalized per head if there are weights [Hq + Hkv, D], then rotated.

        May write into `qk` and return it.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for [T, 2 * I] holding both; [T, I]. May write into its input."""


class TorchOps:
    """DecoderOps in plain torch, in as few calls as it allows; large projections by the calls that a CPU wants."""

    def projection(self, weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.device.type == "cpu":
            return cpu_projection(weight, bias)
        return lambda x: functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(residual.add_(x), weight.shape, weight, eps)

    def rotate(self, qk: Tensor, norm: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
        if norm is not None:
            qk = functional.rms_norm(qk, qk.shape[-1:], None, eps).mul_(norm)
        swapped = qk.roll(qk.shape[-1] // 2, -1)
        return qk.mul_(rotation.cos).addcmul_(swapped, rotation.sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate, inplace=True).mul_(up)


class RotaryTable:
    """Cosines and sines of every position, computed once in float32.

    `table` is [positions, 2, D]: [:, 0] holds cos of each pair's angle twice, [:, 1] holds -sin, then sin. So rotating
    x is x * cos + swap_halves(x) * sin.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, positions: int, device: torch.device) -> None:
        frequencies, scale = rotary_frequencies(rope, head_dim)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos().mul_(scale), angles.sin().mul_(scale)
        self.table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation of `positions` [T] for queries and keys of `dtype`."""
        rows = self.table.index_select(0, positions).to(dtype)
        return Rotation(rows[:, :1], rows[:, 1:])


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2] in float32, and the factor that cos and sin are multiplied with."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim), _yarn_scale(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    turns = rope.original_max_position * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): dimensions that turn often are kept, those that hardly turn are stretched."""

    def dimension(rotations: float) -> float:
        return (head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_scale(rope: RopeConfig) -> float:
    """YaRN's attention temperature, applied to queries and keys alike."""

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
