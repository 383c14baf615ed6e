"""How decode attention's work is cut: properties of the plan, without any kernel."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine_core.ops.cuda.splits import LEAST_PAGES, MAX_SPLITS, PAGE, Item, plan_splits, wave_items

LENGTHS = st.lists(st.one_of(st.none(), st.integers(1, 40_000)), min_size=1, max_size=80)
WAVES = st.integers(1, 200)


def pages_of(length: int | None) -> int:
    return 0 if length is None else -(-length // PAGE)


@given(LENGTHS, WAVES)
def test_every_page_is_in_one_item(lengths: Sequence[int | None], wave: int) -> None:
    """Red if a page is attended to twice or left out, or a padding row gets work."""
    covered: dict[int, list[int]] = {}
    for item in plan_splits(lengths, wave):
        covered.setdefault(item.row, []).extend(range(item.first_page, item.first_page + item.pages))
    assert covered == {row: list(range(pages_of(length))) for row, length in enumerate(lengths) if length}


@given(LENGTHS, WAVES)
def test_items_fit_the_grid(lengths: Sequence[int | None], wave: int) -> None:
    """Red if there could be more items than blocks, rows + wave: some pages would never be attended to."""
    items = plan_splits(lengths, wave)
    assert len(items) <= len(lengths) + wave
    assert all(item.splits <= MAX_SPLITS for item in items)


@given(LENGTHS, WAVES)
def test_rows_are_cut_evenly(lengths: Sequence[int | None], wave: int) -> None:
    """Red if one item of a row is longer than another by more than a page, or items are needlessly short."""
    by_row: dict[int, list[Item]] = {}
    for item in plan_splits(lengths, wave):
        by_row.setdefault(item.row, []).append(item)
    for items in by_row.values():
        sizes = [item.pages for item in items]
        assert max(sizes) - min(sizes) <= 1
        assert [item.split for item in items] == list(range(len(items)))
        assert len(items) == 1 or min(sizes) >= LEAST_PAGES // 2


def test_a_lone_long_row_fills_the_wave() -> None:
    """Red if a single request leaves most of the SMs idle."""
    wave = wave_items(kv_heads=8, sms=132, blocks_per_sm=2)
    assert 0.9 * wave < len(plan_splits([16384], wave)) <= wave
