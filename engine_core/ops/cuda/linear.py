"""Linear layers for 1 to 16 rows: weight streaming, with the norm before and the add or gate after in the same kernel.

Owns the choice of tile and of where the norm is done: in the linear layer's own kernel for up to NORMED_TOKENS rows, in
one before it for more, where every block would norm every row. Beyond MAX_TOKENS rows cuBLAS is the better tool; this
refuses them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import Enum

import torch

from engine_core.ops.cuda.kernel import Kernel, Kernels, Launch, address, require
from engine_core.ops.cuda.layer import AddRmsNorm

MAX_TOKENS = 16
NORMED_TOKENS = 3
STAGED_PADDING = 32
PIECE = 64
"""Columns of a weight matrix come in pieces of this many."""


class Epilogue(Enum):
    """What happens to x W^T before it is stored."""

    PLAIN = "PLAIN"
    ADD = "ADD"
    """A residual is added; the output may be the residual itself."""
    GATED = "GATED"
    """W holds gate rows, then as many up rows: silu(gate) * up is stored."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut: see skinny_linear.cu."""

    warps: int
    row_tiles: int
    depth: int
    ahead: int = 2

    def output_rows(self, epilogue: Epilogue) -> int:
        return 16 * self.row_tiles // (2 if epilogue is Epilogue.GATED else 1)


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """The constants of one layer. `weight` bf16 [rows, columns]; `norm` (RMSNorm before it) bf16 [columns]; `bias` bf16
    [rows]. With `wide` the output is float32."""

    weight: torch.Tensor
    epilogue: Epilogue = Epilogue.PLAIN
    norm: torch.Tensor | None = None
    epsilon: float = 0.0
    bias: torch.Tensor | None = None
    wide: bool = False

    @property
    def outputs(self) -> int:
        return self.weight.shape[0] // (2 if self.epilogue is Epilogue.GATED else 1)


def choose_tile(layer: LinearWeights, tokens: int) -> Tile:
    """The tile measured best on an H200 for the shapes of a 4B model; see scripts/gpu_kernels.py."""
    if tokens > 8:
        return Tile(warps=8, row_tiles=2, depth=3)
    long_rows = layer.weight.shape[1] > 8192
    few_blocks = layer.epilogue is Epilogue.PLAIN and not layer.wide
    return Tile(warps=8, row_tiles=1, depth=2 if long_rows or few_blocks else 3)


def staged_bytes(layer: LinearWeights, tokens: int) -> int:
    """Shared memory for the rows of x that are normed in the kernel: each padded by 64 bytes."""
    return tokens * (layer.weight.shape[1] + STAGED_PADDING) * 2


def kernel(layer: LinearWeights, tokens: int, tile: Tile) -> Kernel:
    """The kernel for up to 3, 8 or 16 rows."""
    normed = layer.norm is not None and tokens <= NORMED_TOKENS
    parameters = (
        ("COLUMNS", layer.weight.shape[1]),
        ("WARPS", tile.warps),
        ("ROW_TILES", tile.row_tiles),
        ("TOKEN_TILES", 1 if tokens <= 8 else 2),
        ("DEPTH", tile.depth),
        ("AHEAD", tile.ahead),
        ("NORMED", int(normed)),
        ("EPILOGUE", layer.epilogue.value),
        ("WIDE", int(layer.wide)),
    )
    shared = staged_bytes(layer, NORMED_TOKENS) if normed else 0
    return Kernel("skinny_linear.cu", "skinny_linear", parameters, shared)


@dataclass(frozen=True, slots=True)
class _Variant:
    """What runs for up to `tokens` rows."""

    tokens: int
    tile: Tile
    launch: Launch
    normed: bool


class SkinnyLinear:
    """y = epilogue(norm(x) W^T + bias) for x of 1 to MAX_TOKENS rows."""

    def __init__(self, layer: LinearWeights, kernels: Kernels, tile: Tile | None = None) -> None:
        """Loads (and compiles) what runs for any number of rows. Raises ValueError on a wrong shape."""
        rows, columns = layer.weight.shape
        require(layer.weight, torch.bfloat16, (rows, columns), "weight")
        if columns % PIECE:
            raise ValueError(f"weight has {columns} columns; it must be a multiple of {PIECE}")
        if layer.bias is not None:
            require(layer.bias, torch.bfloat16, (rows,), "bias")
        if layer.epilogue is Epilogue.GATED and (rows % 2 or layer.bias is not None):
            raise ValueError("a gated layer has as many gate rows as up rows, and no bias")
        self.layer = layer
        self._norm: AddRmsNorm | None = None
        if layer.norm is not None:
            require(layer.norm, torch.bfloat16, (columns,), "norm weight")
            self._norm = AddRmsNorm(columns, layer.epsilon, kernels)
            self._normed = torch.empty(MAX_TOKENS, columns, dtype=torch.bfloat16, device=layer.weight.device)
        self._variants = [
            _Variant(
                tokens,
                tile or choose_tile(layer, tokens),
                kernels.load(kernel(layer, tokens, tile or choose_tile(layer, tokens))),
                layer.norm is not None and tokens <= NORMED_TOKENS,
            )
            for tokens in (NORMED_TOKENS, 8, MAX_TOKENS)
        ]

    def __call__(self, x: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """x: bf16 [tokens, columns]; y: bf16 (or float32, if wide) [tokens, outputs]; residual: as y, for ADD alone."""
        layer, tokens = self.layer, x.shape[0]
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"{tokens} rows; this kernel takes 1 to {MAX_TOKENS}")
        require(x, torch.bfloat16, (tokens, layer.weight.shape[1]), "x")
        require(y, torch.float32 if layer.wide else torch.bfloat16, (tokens, layer.outputs), "y")
        if (residual is not None) != (layer.epilogue is Epilogue.ADD):
            raise ValueError("a residual goes with the ADD epilogue, and only with it")
        if residual is not None:
            require(residual, torch.bfloat16, (tokens, layer.outputs), "residual")
        variant = next(variant for variant in self._variants if tokens <= variant.tokens)
        if self._norm is not None and layer.norm is not None and not variant.normed:
            self._norm(None, x, layer.norm, self._normed[:tokens])
            x = self._normed[:tokens]
        self._launch(variant, x, y, residual)

    def _launch(self, variant: _Variant, x: torch.Tensor, y: torch.Tensor, residual: torch.Tensor | None) -> None:
        layer, tokens = self.layer, x.shape[0]
        rows = variant.tile.output_rows(layer.epilogue)
        variant.launch(
            (-(-layer.outputs // rows), 1, 1),
            32 * variant.tile.warps,
            [
                address(layer.weight),
                address(x),
                address(layer.norm),
                address(layer.bias),
                address(residual),
                address(y),
                ctypes.c_int32(layer.weight.shape[0]),
                ctypes.c_int32(tokens),
                ctypes.c_float(layer.epsilon),
            ],
            staged_bytes(layer, tokens) if variant.normed else 0,
        )
