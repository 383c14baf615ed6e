"""The small kernels of a decoder: embedding, add + RMSNorm, silu * up, QK norm + rotary embedding + KV write, and the
merge of attention over two spans.

Owns their launches; embed.cu, norm.cu, gate.cu, rope.cu and merge.cu say what they do. For any number of rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine_core.ops.cuda.kernel import Argument, Kernel, Kernels, address, require
from engine_core.ops.cuda.streamk import NO_PARTS, Parts, PartsArgument

THREADS = 256
MOST_THREADS = 1024
EMBED_THREADS = 128
HEAD_DIMS = (64, 128)


def _kernel(source: str, entry: str, parameters: tuple[tuple[str, int], ...] = (), *, parts: int) -> Kernel:
    return Kernel(source, entry, (*parameters, ("PARTS", parts)), beside_rings=bool(parts))


def _given(product: torch.Tensor | Parts | None, shape: tuple[int, int]) -> tuple[torch.Tensor | None, PartsArgument]:
    """(the whole product, its parts): one of them at most."""
    if not isinstance(product, Parts):
        return product, NO_PARTS
    if product.shape != shape:
        raise ValueError(f"the parts are of {product.shape}; they must be of {shape}")
    return None, product.argument()


class EmbedLast:
    """y = the embedding of each row's newest token, taken by slot: what feeds a decode step."""

    def __init__(self, kernels: Kernels) -> None:
        self._launch = kernels.load(Kernel("embed.cu", "embed_last"))

    def __call__(self, table: torch.Tensor, last_token: torch.Tensor, slots: torch.Tensor, y: torch.Tensor) -> None:
        """table: bf16 [vocabulary, width]; last_token: int32 [slots]; slots: int32 [rows]; y: bf16 [rows, width].

        The width is a multiple of 8. A row of slot -1 becomes zero.
        """
        rows, width = y.shape
        require(table, torch.bfloat16, (None, width), "table")
        require(last_token, torch.int32, (None,), "last_token")
        require(slots, torch.int32, (rows,), "slots")
        require(y, torch.bfloat16, (rows, width), "y")
        if width % 8:
            raise ValueError(f"the width is {width}; it must be a multiple of 8")
        blocks = -(-width // 8 // EMBED_THREADS)
        tensors: list[Argument] = [address(tensor) for tensor in (table, last_token, slots, y)]
        self._launch((blocks, rows, 1), EMBED_THREADS, [*tensors, ctypes.c_int32(width)])


class AddRmsNorm:
    """residual += x, y = RMSNorm(residual) * weight."""

    def __init__(self, width: int, epsilon: float, kernels: Kernels) -> None:
        if width % 8:
            raise ValueError(f"the hidden size is {width}; it must be a multiple of 8")
        self._width = width
        self._epsilon = ctypes.c_float(epsilon)
        self._threads = THREADS, min(MOST_THREADS, -(-width // 4 // 32) * 32)
        self._launches = [
            kernels.load(_kernel("norm.cu", "add_rms_norm", (("WIDTH", width), ("THREADS", threads)), parts=parts))
            for parts, threads in enumerate(self._threads)
        ]

    def __call__(
        self, x: torch.Tensor | Parts | None, residual: torch.Tensor, weight: torch.Tensor, y: torch.Tensor
    ) -> None:
        """bf16 [rows, width] each, weight [width]; x None adds nothing; y may be x. `residual` is updated in place."""
        rows = residual.shape[0]
        x, parts = _given(x, (rows, self._width))
        for tensor, what in ((residual, "residual"), (y, "y"), *(() if x is None else ((x, "x"),))):
            require(tensor, torch.bfloat16, (rows, self._width), what)
        require(weight, torch.bfloat16, (self._width,), "weight")
        arguments: list[Argument] = [address(tensor) for tensor in (x, residual, weight, y)]
        way = 1 if parts.sums else 0
        self._launches[way]((rows, 1, 1), self._threads[way], [*arguments, parts, self._epsilon])


class SiluMul:
    """y = silu(gate) * up for rows of gate and up side by side."""

    def __init__(self, kernels: Kernels) -> None:
        self._launch, self._of_parts = (kernels.load(_kernel("gate.cu", "silu_mul", parts=parts)) for parts in (0, 1))

    def __call__(self, gate_up: torch.Tensor | Parts, y: torch.Tensor) -> None:
        """gate_up: bf16 [rows, 2 width]; y: bf16 [rows, width], width a multiple of 8."""
        rows, width = y.shape
        if width % 8:
            raise ValueError(f"the width is {width}; it must be a multiple of 8")
        require(y, torch.bfloat16, (rows, width), "y")
        whole, parts = _given(gate_up, (rows, 2 * width))
        if whole is not None:
            require(whole, torch.bfloat16, (rows, 2 * width), "gate_up")
        launch, each = (self._of_parts, 4) if parts.sums else (self._launch, 8)
        blocks = -(-width // each // THREADS)
        launch((blocks, rows, 1), THREADS, [address(whole), address(y), parts, ctypes.c_int32(width)])


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of attention; `head_dim` 64 or 128, a page `page_size` tokens."""

    query: int
    kv: int
    head_dim: int
    page_size: int = 16

    @property
    def total(self) -> int:
        """Heads of a fused qkv row."""
        return self.query + 2 * self.kv


def rope_table(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What RopeAndStore reads, float32 [positions, head_dim], from cos and sin [positions, head_dim / 2]."""
    return torch.cat((cos.float(), sin.float()), dim=-1).contiguous()


class RopeAndStore:
    """Queries normed and rotated in place, keys likewise and values into their pages."""

    def __init__(self, heads: Heads, epsilon: float, kernels: Kernels, *, qk_norm: bool) -> None:
        if heads.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {heads.head_dim}; served are {HEAD_DIMS}")
        self._heads = heads
        self._qk_norm = qk_norm
        self._epsilon = ctypes.c_float(epsilon)
        parameters = (("HEAD_DIM", heads.head_dim), ("QK_NORM", int(qk_norm)))
        self._launch, self._of_parts = (
            kernels.load(_kernel("rope.cu", "rope_and_store", parameters, parts=parts)) for parts in (0, 1)
        )

    def __call__(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        rope: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        page_table: torch.Tensor,
        kv: torch.Tensor,
        product: tuple[Parts, torch.Tensor | None] | None = None,
    ) -> None:
        """One layer's tokens. A token whose slot is -1 is left alone and writes nothing.

        With `product`, parts of [tokens, (query + 2 kv heads) head_dim] and a bias, that is what is normed, rotated and
        stored, and `qkv` gets the queries, rotated.
        Only `qkv` or the product may come from the launch just before this one; the other inputs must be older.
        qkv: bf16 [tokens, query + 2 kv heads, head_dim]; norms: the queries' and the keys' weights, bf16 [head_dim];
        rope: `rope_table`; positions, slots: int32 [tokens]; page_table: int32 [slots, width]; kv: bf16
        [pages, 2, page_size, kv heads, head_dim].
        """
        heads, tokens = self._heads, qkv.shape[0]
        require(qkv, torch.bfloat16, (tokens, heads.total, heads.head_dim), "qkv")
        require(rope, torch.float32, (None, heads.head_dim), "rope")
        require(positions, torch.int32, (tokens,), "positions")
        require(slots, torch.int32, (tokens,), "slots")
        require(page_table, torch.int32, (None, None), "page_table")
        require(kv, torch.bfloat16, (None, 2, heads.page_size, heads.kv, heads.head_dim), "kv")
        if (norms is not None) != self._qk_norm:
            raise ValueError("norm weights go with a model that norms queries and keys")
        q_norm, k_norm = norms or (None, None)
        given, bias = product or (None, None)
        width = heads.total * heads.head_dim
        _, parts = _given(given, (tokens, width))
        if bias is not None:
            require(bias, torch.bfloat16, (width,), "bias")
        of_block = THREADS // (heads.head_dim // 8)
        launch = self._of_parts if parts.sums else self._launch
        launch(
            (-(-heads.total // of_block), tokens, 1),
            THREADS,
            [
                *(address(tensor) for tensor in (qkv, q_norm, k_norm, rope, positions, slots, page_table, kv, bias)),
                parts,
                ctypes.c_int32(heads.query),
                ctypes.c_int32(heads.kv),
                ctypes.c_int32(heads.page_size),
                ctypes.c_int32(page_table.shape[1]),
                self._epsilon,
            ],
        )


class MergeSpans:
    """out = attention over two spans of keys, from the output and the base-2 log-sum-exp that each span gave alone."""

    def __init__(self, heads: Heads, kernels: Kernels) -> None:
        self._heads = heads
        self._launch = kernels.load(Kernel("merge.cu", "merge_spans", (("HEAD_DIM", heads.head_dim),)))

    def __call__(self, other: torch.Tensor, other_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """other, out: bf16 [tokens, query heads, head_dim]; their lse: float32 [tokens, query heads]. `out` is
        updated in place. `other_lse` may be minus infinity, `lse` may not."""
        heads, tokens = self._heads, out.shape[0]
        for tensor, what in ((other, "other"), (out, "out")):
            require(tensor, torch.bfloat16, (tokens, heads.query, heads.head_dim), what)
        for tensor, what in ((other_lse, "other_lse"), (lse, "lse")):
            require(tensor, torch.float32, (tokens, heads.query), what)
        rows, of_block = tokens * heads.query, THREADS // (heads.head_dim // 8)
        tensors: list[Argument] = [address(tensor) for tensor in (other, other_lse, out, lse)]
        self._launch((-(-rows // of_block), 1, 1), THREADS, [*tensors, ctypes.c_int32(rows)])
