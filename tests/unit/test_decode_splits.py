"""How decode attention's work is dealt out: properties of the plan, without any kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from engine_core.ops.cuda.splits import LEAST_PAGES, MAX_SPLITS, PAGE, Item, blocks_at_a_time, plan_splits

LENGTHS = st.lists(st.one_of(st.none(), st.integers(1, 40_000)), min_size=1, max_size=80)
BLOCKS = st.integers(1, 400)


def pages_of(length: int | None) -> int:
    return 0 if length is None else -(-length // PAGE)


@given(LENGTHS, BLOCKS)
def test_every_page_is_in_one_item(lengths: Sequence[int | None], blocks: int) -> None:
    """Red if a page is attended to twice or left out, or a padding row gets work."""
    covered: dict[int, list[int]] = {}
    for item in chain(*plan_splits(lengths, blocks)):
        covered.setdefault(item.row, []).extend(range(item.first_page, item.first_page + item.pages))
    assert covered == {row: list(range(pages_of(length))) for row, length in enumerate(lengths) if length}


@given(LENGTHS, BLOCKS)
def test_items_fit_the_workspace(lengths: Sequence[int | None], blocks: int) -> None:
    """Red if there could be more items than rows + blocks, or a row in more than the merge holds."""
    plan = plan_splits(lengths, blocks)
    assert len(plan) == blocks
    assert sum(map(len, plan)) <= len(lengths) + blocks
    by_row: dict[int, list[Item]] = {}
    for item in chain(*plan):
        by_row.setdefault(item.row, []).append(item)
    for items in by_row.values():
        assert [item.split for item in items] == list(range(len(items)))
        assert {item.splits for item in items} == {len(items)}
        assert len(items) <= MAX_SPLITS


@given(LENGTHS, BLOCKS)
def test_blocks_get_equal_stretches(lengths: Sequence[int | None], blocks: int) -> None:
    """Red if one block works while the others are done, or if blocks get needlessly little."""
    busy = [sum(item.pages for item in items) for items in plan_splits(lengths, blocks) if items]
    assert not busy or max(busy) - min(busy) <= 1
    assert len(busy) <= 1 or min(busy) >= LEAST_PAGES


def test_a_lone_long_row_keeps_all_blocks_busy() -> None:
    """Red if a single request leaves most of the SMs idle."""
    blocks = blocks_at_a_time(kv_heads=8, sms=132, blocks_per_sm=2)
    assert all(plan_splits([16384], blocks))
