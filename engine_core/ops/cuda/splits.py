"""How decode attention's work is dealt out to blocks: plain arithmetic, imported by the launcher and checked without a
GPU.

Owns the size of the grid, fixed by the SMs, and the reference of the plan that the device makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 16
"""Tokens."""
LEAST_PAGES = 4
"""A block gets at least as many, unless there are fewer: one page for each warp of a block of four."""
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


def blocks_at_a_time(kv_heads: int, sms: int, blocks_per_sm: int) -> int:
    """Blocks, each for every kv head, that run at the same time."""
    return max(1, sms * blocks_per_sm // kv_heads)


def plan_splits(lengths: Sequence[int | None], blocks: int, least_pages: int = LEAST_PAGES) -> list[list[Item]]:
    """The device's plan for context lengths in tokens (None: a padding row): each block's items.

    All rows' pages lie one behind the other, and every block gets an equal stretch of them, whatever rows they are of.
    """
    pages = [0 if length is None else -(-length // PAGE) for length in lengths]
    total, longest = sum(pages), max(pages)
    least = max(least_pages, -(-longest // (MAX_SPLITS - 2)))
    needed = max(1, min(blocks, total // least)) if total else 0
    shares = [block * total // needed for block in range(needed + 1)] if total else []
    plan: list[list[Item]] = [[] for _ in range(blocks)]
    begin = 0
    for row, of_row in enumerate(pages):
        end = begin + of_row
        within = [block for block in range(needed) if max(begin, shares[block]) < min(end, shares[block + 1])]
        for split, block in enumerate(within):
            first, last = max(begin, shares[block]), min(end, shares[block + 1])
            plan[block].append(Item(row, first - begin, last - first, len(within), split))
        begin = end
    return plan
