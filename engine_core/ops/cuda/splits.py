"""How decode attention's work is cut over blocks: plain arithmetic, imported by the launcher and checked without a GPU.

Owns the size of the grid, fixed by the batch bucket and the SMs, and the reference of the plan that the device makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 16
"""Tokens."""
LEAST_PAGES = 4
"""An item is at least this long, unless its row is shorter: one page for each warp of a block."""
MAX_SPLITS = 128
"""Of one row: what the merge of its partial results holds."""
MAX_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Item:
    """Pages [first_page, first_page + pages) of a row's table, the `split`-th of the row's `splits` items."""

    row: int
    first_page: int
    pages: int
    splits: int
    split: int


def wave_items(kv_heads: int, sms: int, blocks_per_sm: int) -> int:
    """Items that run at the same time: blocks that fit on the SMs, each item being one block for every kv head."""
    return max(1, sms * blocks_per_sm // kv_heads)


def plan_splits(lengths: Sequence[int | None], wave: int, least_pages: int = LEAST_PAGES) -> list[Item]:
    """The device's plan for context lengths in tokens (None: a padding row).

    At most `wave` items, or the next multiple of it that holds a row each, of the smallest common size that allows it;
    every row is cut evenly, into as few items as keeps each at or under that size.
    """
    pages = [0 if length is None else -(-length // PAGE) for length in lengths]
    live, longest = sum(count > 0 for count in pages), max(pages)
    limit = max(-(-live // wave), 1) * wave
    size = max(-(-sum(pages) // limit), -(-longest // MAX_SPLITS), least_pages)
    while size < longest and sum(-(-count // size) for count in pages) > limit:
        size += 1
    items = []
    for row, of_row in enumerate(pages):
        splits = -(-of_row // size)
        for split in range(splits):
            first, end = of_row * split // splits, of_row * (split + 1) // splits
            items.append(Item(row, first, end - first, splits, split))
    return items
