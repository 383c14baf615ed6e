"""Matrix products of a few dozen rows, bound by the reading of their weights: stream-K, as partial sums.

Owns the cut of the work and the launch. `streamk_linear.cu` says how it is done; whoever needs the product, a kernel of
layer.py, adds up its parts (`Parts`), so that no block waits for another one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from engine_core.ops.cuda.kernel import Kernel, Kernels, Launch, address, require

MAX_TOKENS = 64
TOKEN_TILES = (2, 4, 6, 8)
"""Rows of x in tiles of 8 that there are kernels for."""
RING_BYTES = 200 << 10
"""Of an SM's 227 KiB: a small kernel's blocks want a KiB each beside it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is cut: see streamk_linear.cu."""

    row_tiles: int
    warpgroups: int
    chunk: int
    stages: int

    @property
    def tile(self) -> int:
        """Outputs."""
        return 64 * self.row_tiles * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    def shared_bytes(self, token_tiles: int) -> int:
        return self.stages * (self.tile + 8 * token_tiles) * 2 * self.chunk


class PartsArgument(ctypes.Structure):
    """`Parts` of parts.cuh."""

    _fields_ = (
        ("sums", ctypes.c_void_p),
        ("tokens", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("tile", ctypes.c_int32),
        ("chunks", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Parts:
    """A product of which each output is a sum of float32 parts."""

    sums: torch.Tensor
    """float32 [most parts, tokens, outputs]; of an output's parts beyond its count nothing is written."""
    tile: int
    chunks: int
    blocks: int

    @property
    def shape(self) -> tuple[int, int]:
        """(tokens, outputs)"""
        return self.sums.shape[1], self.sums.shape[2]

    def argument(self) -> PartsArgument:
        tokens, outputs = self.shape
        return PartsArgument(self.sums.data_ptr(), tokens, outputs, self.tile, self.chunks, self.blocks)


NO_PARTS = PartsArgument()


@cache
def most_parts(tiles: int, chunks: int, blocks: int) -> int:
    """Of an output, with `blocks` no more than there are chunks in all."""
    total = tiles * chunks

    def block_of(chunk: int) -> int:
        return ((chunk + 1) * blocks - 1) // total

    return max(block_of(tile * chunks + chunks - 1) - block_of(tile * chunks) + 1 for tile in range(tiles))


MANY_SMS = 100
"""From so many on a lane can read at the memory's own pace."""


def streams(rows: int, sms: int) -> bool:
    """Whether a lane multiplies so many decode rows faster this way than by cuBLASLt's best, measured on an H200 for
    the shapes of a 4B model: with many rows on few SMs the rows are what takes longest to read."""
    return rows <= (MAX_TOKENS if sms >= 72 else MAX_TOKENS // 2)


def choose_cut(columns: int, token_tiles: int, sms: int) -> Cut:
    """The cut measured best on an H200: one block an SM, long pieces of a row, as many stages as leave room for the
    blocks of a small kernel; small tiles, that is few parts, or, beside another lane, larger ones that read x less
    often."""
    chunk, warpgroups = 128 if columns % 128 == 0 else 64, 1 if sms >= MANY_SMS else 2
    return Cut(1, warpgroups, chunk, RING_BYTES // Cut(1, warpgroups, chunk, 1).shared_bytes(token_tiles))


@dataclass(frozen=True, slots=True)
class _Variant:
    """What runs for up to 8 `token_tiles` rows."""

    token_tiles: int
    cut: Cut
    launch: Launch


class StreamKLinear:
    """x W^T for x of 1 to MAX_TOKENS rows."""

    def __init__(self, weight: torch.Tensor, kernels: Kernels, cut: Cut | None = None, *, whole: bool = False) -> None:
        """Loads (and compiles) what runs for any number of rows. weight: bf16 [outputs, columns]. With `whole` each
        output has one part. Raises ValueError on a wrong shape."""
        outputs, columns = weight.shape
        require(weight, torch.bfloat16, (outputs, columns), "weight")
        self.weight = weight
        self._whole = whole
        self._variants = {
            many: [self._variant(token_tiles, sms, kernels, cut) for token_tiles in TOKEN_TILES]
            for many, sms in ((True, MANY_SMS), (False, 1))
        }

    def _variant(self, token_tiles: int, sms: int, kernels: Kernels, cut: Cut | None) -> _Variant:
        outputs, columns = self.weight.shape
        cut = cut or choose_cut(columns, token_tiles, sms)
        if columns % cut.chunk or (outputs % 4 and not self._whole):  # parts are added up by four
            raise ValueError(
                f"weight is {outputs} x {columns}: it must have a multiple of 4 outputs and {cut.chunk} columns"
            )
        return _Variant(token_tiles, cut, kernels.load(self._kernel(cut, token_tiles)))

    def _kernel(self, cut: Cut, token_tiles: int) -> Kernel:
        outputs, columns = self.weight.shape
        parameters = (
            ("OUTPUTS", outputs),
            ("COLUMNS", columns),
            ("CHUNK", cut.chunk),
            ("TOKEN_TILES", token_tiles),
            ("ROW_TILES", cut.row_tiles),
            ("WARPGROUPS", cut.warpgroups),
            ("STAGES", cut.stages),
            ("WHOLE", int(self._whole)),
        )
        return Kernel(
            "streamk_linear.cu", "streamk_linear", parameters, cut.shared_bytes(token_tiles), beside_rings=True
        )

    def __call__(self, x: torch.Tensor, sms: int) -> Parts:
        """x: bf16 [tokens, columns]; `sms`: of the lane that will run it. The result is a temporary."""
        (outputs, columns), tokens = self.weight.shape, x.shape[0]
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"{tokens} rows; this kernel takes 1 to {MAX_TOKENS}")
        require(x, torch.bfloat16, (tokens, columns), "x")
        variants = self._variants[sms >= MANY_SMS]
        variant = next(variant for variant in variants if tokens <= 8 * variant.token_tiles)
        cut = variant.cut
        tiles, chunks = -(-outputs // cut.tile), columns // cut.chunk
        blocks = min(sms, tiles if self._whole else tiles * chunks)
        most = 1 if self._whole else most_parts(tiles, chunks, blocks)
        sums = torch.empty(most, tokens, outputs, dtype=torch.float32, device=x.device)
        variant.launch(
            (blocks, 1, 1),
            cut.threads,
            [address(self.weight), address(x), address(sums), ctypes.c_int32(tokens)],
            cut.shared_bytes(variant.token_tiles),
        )
        return Parts(sums, cut.tile, chunks, blocks)
