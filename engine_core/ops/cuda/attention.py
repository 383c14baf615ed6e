"""Decode attention: one query token a row, lengths and page tables read from device memory.

Owns its workspaces and the two launches: the plan, once a step, and attention, once a layer. No host planning between
steps: the grid depends on the SMs alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine_core.ops.cuda.kernel import Kernel, Kernels, address, require
from engine_core.ops.cuda.layer import HEAD_DIMS, Heads
from engine_core.ops.cuda.splits import LEAST_PAGES, MAX_ROWS, PAGE, blocks_at_a_time

SOURCE = "decode_attention.cu"
PLAN_THREADS = 32
ITEM_BYTES = 16
MAX_GROUP = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """Warps of a block, and the blocks that each SM holds at a time."""

    warps: int
    blocks_per_sm: int
    stages: int = 3
    """Pages of a warp's ring in shared memory."""

    def shared_bytes(self, head_dim: int) -> int:
        return self.warps * self.stages * PAGE * 2 * head_dim * 2


MANY_SMS, FEW_SMS = Cut(8, 1), Cut(4, 3, 2)


def choose_cut(sms: int) -> Cut:
    """The cut measured best on an H200, at 1 to 128 rows of 300 to 8000 tokens: many SMs share the memory's bandwidth,
    few are each bound by what one can do, which is more with more warps."""
    return MANY_SMS if sms >= 72 else FEW_SMS


def _kernel(heads: Heads, cut: Cut, entry: str) -> Kernel:
    shape = (("HEAD_DIM", heads.head_dim), ("GROUP", heads.query // heads.kv))
    parameters = (*shape, ("WARPS", cut.warps), ("STAGES", cut.stages))
    return Kernel(SOURCE, entry, parameters, cut.shared_bytes(heads.head_dim))


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
        self._max_rows = max_rows
        self._cut = cut or choose_cut(sms)
        self._blocks = blocks_at_a_time(heads.kv, sms, self._cut.blocks_per_sm)
        capacity = max_rows + self._blocks
        self._items = torch.zeros(capacity, ITEM_BYTES, dtype=torch.uint8, device=device)
        self._ranges = torch.zeros(self._blocks, 2, dtype=torch.int32, device=device)
        self._partial_output = torch.empty(capacity, heads.query, heads.head_dim, dtype=torch.float32, device=device)
        self._partial_weight = torch.empty(capacity, heads.query, 2, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(max_rows, heads.kv, dtype=torch.int32, device=device)
        self._plan = kernels.load(_kernel(heads, self._cut, "plan_splits"))
        self._attend = kernels.load(_kernel(heads, self._cut, "decode_attention"))

    @property
    def workspace_bytes(self) -> int:
        tensors = (self._items, self._ranges, self._partial_output, self._partial_weight, self._arrivals)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def plan(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Deal this step's rows out to the blocks. int32 [rows] each, slot -1 for padding.

        At least one other launch must lie between this and the first layer's attention, one that adds up a product's
        parts not counted, unless that product lies between as well.
        """
        rows = slots.shape[0]
        if rows > self._max_rows:
            raise ValueError(f"{rows} rows; this was made for up to {self._max_rows}")
        require(slots, torch.int32, (rows,), "slots")
        require(positions, torch.int32, (rows,), "positions")
        scalars = (ctypes.c_int32(value) for value in (rows, self._blocks, LEAST_PAGES))
        buffers = (address(tensor) for tensor in (slots, positions, self._items, self._ranges))
        self._plan((1, 1, 1), PLAN_THREADS, [*buffers, *scalars])

    def __call__(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        page_table: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """out[row] = attention of row's query over positions 0 .. positions[row], for the rows that `plan` was told
        of. Rows of slot -1 aren't written.

        qkv: bf16 [rows, query + 2 kv heads, head_dim], whose queries are used; kv: bf16
        [pages, 2, page_size, kv heads, head_dim], this step's token included; page_table: int32 [slots, width];
        out: bf16 [rows, query heads, head_dim].
        """
        heads = self._heads
        rows = qkv.shape[0]
        require(qkv, torch.bfloat16, (rows, heads.total, heads.head_dim), "qkv")
        require(kv, torch.bfloat16, (None, 2, PAGE, heads.kv, heads.head_dim), "kv")
        require(page_table, torch.int32, (None, None), "page_table")
        require(out, torch.bfloat16, (rows, heads.query, heads.head_dim), "out")
        self._attend(
            (self._blocks, heads.kv, 1),
            32 * self._cut.warps,
            [
                *(address(tensor) for tensor in (qkv, kv, page_table, self._items, self._ranges)),
                *(address(tensor) for tensor in (out, self._partial_output, self._partial_weight, self._arrivals)),
                ctypes.c_int32(heads.total * heads.head_dim),
                ctypes.c_int32(page_table.shape[1]),
                ctypes.c_float(scale * 1.4426950408889634),
            ],
            self._cut.shared_bytes(heads.head_dim),
        )
