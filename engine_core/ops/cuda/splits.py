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
MAX_SPLITS = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Item:
    """Pages [first_page, first_page + pages) of a row's table, the `split`-th of the row's `splits` items."""

    row: int
    first_page: int
    pages: int
    splits: int
    split: int


def spare_items(kv_heads: int, sms: int, blocks_per_sm: int) -> int:
    """Items beyond one a row: enough that items times kv heads fill the SMs even with a single row."""
    return max(1, sms * blocks_per_sm // kv_heads)


def plan_splits(lengths: Sequence[int | None], spare: int, least_pages: int = LEAST_PAGES) -> list[Item]:
    """The device's plan for context lengths in tokens (None: a padding row): at most len(lengths) + spare items.

    Every row is cut evenly, into as many items as keeps each at or under the common size.
    """
    pages = [0 if length is None else (length + PAGE - 1) // PAGE for length in lengths]
    size = max(-(-sum(pages) // spare), least_pages)
    items = []
    for row, of_row in enumerate(pages):
        splits = -(-of_row // size)
        for split in range(splits):
            first, end = of_row * split // splits, of_row * (split + 1) // splits
            items.append(Item(row, first, end - first, splits, split))
    return items
