"""Decode attention: one query token a row, lengths and page tables read from device memory.

Owns its workspaces and the two launches: the plan, once a step, and attention, once a layer. No host planning between
steps: the grid depends on the batch bucket alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine_core.ops.cuda.kernel import Kernel, Kernels, address, require
from engine_core.ops.cuda.layer import HEAD_DIMS, Heads
from engine_core.ops.cuda.splits import LEAST_PAGES, MAX_ROWS, PAGE, wave_items

SOURCE = "decode_attention.cu"
PLAN_THREADS = 32
ITEM_BYTES = 16
MAX_GROUP = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """Warps of a block, and the blocks for each SM that the plan counts on."""

    warps: int
    blocks_per_sm: int
    stages: int = 3
    """Pages of a warp's ring in shared memory."""

    def shared_bytes(self, head_dim: int) -> int:
        return self.warps * self.stages * PAGE * 2 * head_dim * 2


CUTS = (Cut(4, 2), Cut(8, 1), Cut(2, 3))


def choose_cut(rows: int, kv_heads: int, sms: int) -> Cut:
    """The cut measured best on an H200 by the blocks that each SM gets if no row is split."""
    blocks = rows * kv_heads / sms
    if blocks <= 0.25 or blocks > 6:
        return CUTS[0]
    return CUTS[1] if blocks <= 1 else CUTS[2]


def _kernel(heads: Heads, cut: Cut) -> Kernel:
    shape = (("HEAD_DIM", heads.head_dim), ("GROUP", heads.query // heads.kv))
    parameters = (*shape, ("WARPS", cut.warps), ("STAGES", cut.stages))
    return Kernel(SOURCE, "decode_attention", parameters, cut.shared_bytes(heads.head_dim))


class DecodeAttention:
    """Attention for buckets of up to `max_rows` rows. One launch at a time: buffers are shared between layers."""

    def __init__(
        self, heads: Heads, max_rows: int, sms: int, device: torch.device, kernels: Kernels, cut: Cut | None = None
    ) -> None:
        """`sms`: of the lane that will replay it. Raises ValueError for a shape that isn't served."""
        group, rest = divmod(heads.query, heads.kv)
        if max_rows > MAX_ROWS:
            raise ValueError(f"{max_rows} rows; at most {MAX_ROWS} are served")
        if rest or not 1 <= group <= MAX_GROUP or heads.head_dim not in HEAD_DIMS or heads.page_size != PAGE:
            raise ValueError(
                f"{heads} isn't served: 1 to {MAX_GROUP} query heads a kv head, head_dim {HEAD_DIMS}, pages of {PAGE}"
            )
        self._heads = heads
        self._sms = sms
        self._only_cut = cut
        self._max_rows = max_rows
        cuts = CUTS if cut is None else (cut,)
        capacity = max_rows + max(wave_items(heads.kv, sms, cut.blocks_per_sm) for cut in cuts)
        self._items = torch.zeros(capacity, ITEM_BYTES, dtype=torch.uint8, device=device)
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._partial_output = torch.empty(capacity, heads.query, heads.head_dim, dtype=torch.float32, device=device)
        self._partial_weight = torch.empty(capacity, heads.query, 2, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(max_rows, heads.kv, dtype=torch.int32, device=device)
        shape = (("HEAD_DIM", heads.head_dim), ("GROUP", group))
        self._plan = kernels.load(
            Kernel(SOURCE, "plan_splits", (*shape, ("WARPS", cuts[0].warps), ("STAGES", cuts[0].stages)))
        )
        self._attend = {cut: kernels.load(_kernel(heads, cut)) for cut in cuts}

    @property
    def workspace_bytes(self) -> int:
        tensors = (self._items, self._count, self._partial_output, self._partial_weight, self._arrivals)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def plan(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Cut this step's rows into items. int32 [rows] each, slot -1 for padding.

        At least one other launch must lie between this and the first layer's attention.
        """
        rows = self._check_rows(slots, positions)
        _, wave = self._cut(rows)
        scalars = (ctypes.c_int32(value) for value in (rows, wave, LEAST_PAGES))
        buffers = (address(tensor) for tensor in (slots, positions, self._items, self._count))
        self._plan((1, 1, 1), PLAN_THREADS, [*buffers, *scalars])

    def __call__(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        page_table: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """out[row] = attention of row's query over positions 0 .. positions[row]. Rows of slot -1 aren't written.

        qkv: bf16 [rows, query + 2 kv heads, head_dim], whose queries are used; kv: bf16
        [pages, 2, page_size, kv heads, head_dim], this step's token included; page_table: int32 [slots, width];
        out: bf16 [rows, query heads, head_dim].
        """
        heads = self._heads
        rows = self._check_rows(slots, positions)
        require(qkv, torch.bfloat16, (rows, heads.total, heads.head_dim), "qkv")
        require(kv, torch.bfloat16, (None, 2, PAGE, heads.kv, heads.head_dim), "kv")
        require(page_table, torch.int32, (None, None), "page_table")
        require(out, torch.bfloat16, (rows, heads.query, heads.head_dim), "out")
        cut, wave = self._cut(rows)
        self._attend[cut](
            (rows + wave, heads.kv, 1),
            32 * cut.warps,
            [
                *(address(tensor) for tensor in (qkv, kv, slots, positions, page_table, self._items, self._count)),
                *(address(tensor) for tensor in (out, self._partial_output, self._partial_weight, self._arrivals)),
                ctypes.c_int32(heads.total * heads.head_dim),
                ctypes.c_int32(page_table.shape[1]),
                ctypes.c_float(scale * 1.4426950408889634),
            ],
            cut.shared_bytes(heads.head_dim),
        )

    def _cut(self, rows: int) -> tuple[Cut, int]:
        """How a batch of so many rows is cut, and the items of one wave: both fixed by the bucket."""
        cut = self._only_cut or choose_cut(rows, self._heads.kv, self._sms)
        return cut, wave_items(self._heads.kv, self._sms, cut.blocks_per_sm)

    def _check_rows(self, slots: torch.Tensor, positions: torch.Tensor) -> int:
        rows = slots.shape[0]
        if rows > self._max_rows:
            raise ValueError(f"{rows} rows; this was made for up to {self._max_rows}")
        require(slots, torch.int32, (rows,), "slots")
        require(positions, torch.int32, (rows,), "positions")
        return rows
