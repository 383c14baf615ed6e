"""Split decode attention on the CPU: the device's plan, the split, the merge, and what lies beyond a context."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_core.ops.cuda import reference
from engine_core.ops.cuda.attention import Cut, DecodeAttention, choose_cut
from engine_core.ops.cuda.layer import Heads
from engine_core.ops.cuda.splits import PAGE, Item, blocks_at_a_time, plan_splits
from tests.emulated import EmulatedKernels
from tests.emulated.comparing import CPU, assert_near, integers, poisoned, random

SMS = 4
SLOTS = [3, -1, 0, 4, 1]
WIDTH = 40
"""Pages of a sequence."""
ITEM = np.dtype(
    [
        *(("row", "<u2"), ("slot", "<u2"), ("first_page", "<i4"), ("tokens", "<i4")),
        *(("pages", "<u2"), ("splits", "u1"), ("split", "u1")),
    ]
)


class Rows:
    """A batch over a pool that is NaN wherever no token of a context lies."""

    def __init__(self, heads: Heads, lengths: list[int]) -> None:
        self.heads, self.slots, self.lengths = heads, integers(SLOTS), lengths
        self.positions = integers([length - 1 for length in lengths])
        self.table = torch.randperm(WIDTH * 5).to(torch.int32).view(5, WIDTH)
        self.kv = poisoned(WIDTH * 5, 2, PAGE, heads.kv, heads.head_dim)
        for slot, length in zip(SLOTS, lengths, strict=True):
            if slot >= 0:
                where = torch.arange(length)
                lines = random(length, 2, heads.kv, heads.head_dim)
                self.kv[self.table[slot, where // PAGE].long(), :, where % PAGE] = lines
        self.qkv = random(len(SLOTS), heads.total, heads.head_dim)

    def attend(self, attention: DecodeAttention) -> torch.Tensor:
        heads = self.heads
        out = poisoned(len(SLOTS), heads.query, heads.head_dim)
        attention.plan(self.slots, self.positions)
        attention(self.qkv, self.kv, self.table, out, heads.head_dim**-0.5)
        return out

    def wanted(self, row: int) -> torch.Tensor:
        heads = self.heads
        q, pages = self.qkv[row : row + 1, : heads.query], self.table[SLOTS[row]]
        return reference.paged_attention(q, self.kv, pages, self.lengths[row], heads.head_dim**-0.5)[0]


@pytest.mark.parametrize(
    ("heads", "cut"),
    [
        (Heads(4, 2, 128), Cut(4, 3)),
        (Heads(7, 1, 64), Cut(2, 3)),
        (Heads(8, 1, 128), Cut(8, 1)),
        (Heads(2, 2, 64), None),
    ],
)
def test_against_float32_with_poison_beyond_every_context(
    kernels: EmulatedKernels, heads: Heads, cut: Cut | None
) -> None:
    """Red if a lane's token or dimension is off, a masked value is multiplied (0 * NaN), a partial is merged with the
    wrong weight, a padding row is written, or the arrival counters aren't back at zero for the second launch."""
    attention = DecodeAttention(heads, 8, SMS, CPU, kernels, cut)
    for lengths in ([1, 8, 16, 301, 17], [500, 1, 33, 290, 2]):
        rows = Rows(heads, lengths)
        out = rows.attend(attention)
        for row, slot in enumerate(SLOTS):
            if slot >= 0:
                assert_near(out[row], rows.wanted(row))
            else:
                assert bool(out[row].isnan().all())


def test_large_scores_keep_their_softmax(kernels: EmulatedKernels) -> None:
    """Red if the running maximum isn't carried over pages, warps or items: exponents overflow."""
    heads = Heads(4, 1, 64)
    rows = Rows(heads, [300, 1, 40, 2, 129])
    rows.qkv *= 40
    assert_near(rows.attend(DecodeAttention(heads, 8, SMS, CPU, kernels, Cut(4, 3)))[0], rows.wanted(0))


@pytest.mark.parametrize("lengths", [[1] * 5, [640, 640, 640, 640, 640], [1, 2, 3, 620, 16], [17, 5, 200, 33, 34]])
def test_the_device_plans_as_the_reference(kernels: EmulatedKernels, lengths: list[int]) -> None:
    """Red if a share, the order of items or what an item says changes on one side only."""
    heads = Heads(4, 2, 64)
    attention = DecodeAttention(heads, 8, SMS, CPU, kernels, Cut(4, 3))
    attention.plan(integers(SLOTS), integers([length - 1 for length in lengths]))
    live = [None if slot < 0 else length for slot, length in zip(SLOTS, lengths, strict=True)]
    items = attention._items.numpy().view(ITEM)[:, 0]
    planned = [items[first:end] for first, end in attention._ranges.tolist()]
    fields = ["row", "first_page", "pages", "splits", "split"]
    expected = plan_splits(live, blocks_at_a_time(heads.kv, SMS, 3))
    assert [[Item(*map(int, item)) for item in of_block[fields]] for of_block in planned] == expected
    for item in np.concatenate(planned):
        assert item["slot"] == SLOTS[item["row"]]
        assert item["tokens"] == lengths[item["row"]] - PAGE * item["first_page"]


def test_unserved_shapes_are_refused(kernels: EmulatedKernels) -> None:
    """Red if a shape that the kernel would compute wrongly is let through."""
    for heads in (Heads(32, 2, 128), Heads(4, 2, 96), Heads(6, 4, 64), Heads(4, 2, 64, page_size=32)):
        with pytest.raises(ValueError, match="isn't served"):
            DecodeAttention(heads, 8, SMS, CPU, kernels)
    with pytest.raises(ValueError, match="at most"):
        DecodeAttention(Heads(4, 2, 64), 4096, SMS, CPU, kernels)


def test_a_share_of_the_sms_has_a_cut_of_its_own(kernels: EmulatedKernels) -> None:
    """Red if decode beside a prefill got the few warps that do for a whole GPU."""
    whole, share = (choose_cut(sms) for sms in (132, 40))
    assert share.warps * share.blocks_per_sm > whole.warps * whole.blocks_per_sm
    assert DecodeAttention(Heads(4, 2, 64), 8, 40, CPU, kernels)._cut == share
