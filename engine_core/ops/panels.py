"""Linear layers on a CPU, in float32: products of few rows by panels of the matrix.

Owns the choice of the call; the weight stays as it is. A product of 4 to 15 rows with a large matrix is bound by how
the library walks the matrix: MKL repacks it on every call. As a batch of products with 64 of its rows each, views of
it, it doesn't. Measured with 8 rows on two AVX-512 cores, against torch's linear: 3072 x 576 takes two thirds of the
time, a head of 49152 x 576 half of it. Three rows and fewer, or 16 and more, gain nothing, nor do small matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

WIDTH = 64
FEW = range(4, 16)
"""Rows of a product that panels pay for."""
PANEL_MIN_WEIGHTS = 1 << 19

Projection = Callable[[Tensor], Tensor]
"""A linear layer: [T, in] to [T, out]."""


def cpu_projection(weight: Tensor, bias: Tensor | None) -> Projection:
    """A linear layer over weight [out, in], which it doesn't copy."""
    if weight.dtype is torch.float32 and weight.numel() >= PANEL_MIN_WEIGHTS and len(weight) % WIDTH == 0:
        return _Panels(weight, bias)
    return lambda x: functional.linear(x, weight, bias)


class _Panels:
    """y = x W^T + b, for few rows with W^T as a batch of panels [P, in, WIDTH]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self._panels = weight.view(-1, WIDTH, weight.shape[1]).transpose(1, 2)
        self._panel_biases = None if bias is None else bias.view(-1, 1, WIDTH)

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) not in FEW:
            return functional.linear(x, self._weight, self._bias)
        rows = x.expand(len(self._panels), *x.shape)
        if self._panel_biases is None:
            parts = torch.bmm(rows, self._panels)
        else:
            parts = torch.baddbmm(self._panel_biases, rows, self._panels)
        return parts.transpose(0, 1).reshape(len(x), -1)
