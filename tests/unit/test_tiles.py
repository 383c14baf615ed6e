"""How prefill attention is dealt out: properties of the schedule, without any kernel."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.ops.cuda.layer import Heads
from engine_core.ops.cuda.tiles import Ints, Span, TileSchedule, deal

GRID = 12
HEADS = Heads(4, 2, 128)
CHUNKS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 5000)), min_size=1, max_size=8)
"""(queries, keys before them) of each row."""


def filled(chunks: list[tuple[int, int]], sms: int, *, causal: bool) -> tuple[TileSchedule, dict[str, Ints]]:
    schedule = TileSchedule(HEADS, 8, 8 * 700, grid=GRID, sms=sms)
    words = np.full(schedule.words, -7, np.int32)
    lengths, keys = (
        np.array(column) for column in zip(*((count, count + before) for count, before in chunks), strict=True)
    )
    schedule.fill(words, lengths, Span(100 * np.arange(len(chunks)), keys, causal))
    ends = words[schedule.places["ends"] :][: GRID + 1]
    return schedule, {
        name: ends if name == "ends" else words[place : place + ends[-1]] for name, place in schedule.places.items()
    }


@given(CHUNKS, st.integers(1, GRID), st.booleans())
def test_every_tile_of_every_head_once(chunks: list[tuple[int, int]], sms: int, causal: bool) -> None:
    """Red if queries are left out or attended to twice, or a tile names another row's queries, keys or pages."""
    schedule, fields = filled(chunks, sms, causal=causal)
    found = Counter(zip(fields["row"].tolist(), fields["tile"].tolist(), fields["head"].tolist(), strict=True))
    wanted = [
        (row, tile, head)
        for row, (length, _) in enumerate(chunks)
        for tile in range(-(-length // schedule.tile))
        for head in range(HEADS.query)
    ]
    assert found == Counter(wanted)
    firsts = np.cumsum([0, *(length for length, _ in chunks)])
    for row, first, page, queries, keys in zip(
        *(fields[name].tolist() for name in ("row", "first_query", "first_page", "queries", "keys")), strict=True
    ):
        length, before = chunks[row]
        assert (first, page, queries, keys) == (firsts[row], 100 * row, length, length + before)


@given(CHUNKS, st.integers(1, GRID), st.booleans())
def test_only_as_many_blocks_as_run_at_once_have_work(chunks: list[tuple[int, int]], sms: int, causal: bool) -> None:
    """Red if a lane's work lies in more blocks than it has SMs (they would run in turns), or ends aren't ascending."""
    _, fields = filled(chunks, sms, causal=causal)
    ends = fields["ends"]
    assert ends[0] == 0
    assert (np.diff(ends) >= 0).all()
    assert (ends[sms:] == ends[-1]).all()


@given(st.lists(st.integers(1, 10_000), max_size=300), st.integers(1, 140))
def test_dealing_is_even(costs: list[int], blocks: int) -> None:
    """Red if a block gets more than the mean and the costliest piece together."""
    block = deal(np.array(costs, np.int64), blocks)
    loads = np.bincount(block, weights=costs, minlength=blocks)
    assert len(block) == len(costs)
    assert loads.max(initial=0) <= sum(costs) / blocks + 2 * max(costs, default=0)


def test_the_longest_causal_tiles_go_first() -> None:
    """Red if a long prompt's last tiles, which see most keys, are left for the end of a block's work."""
    _, fields = filled([(640, 0)], 2, causal=True)
    for start, end in zip(fields["ends"], fields["ends"][1:], strict=False):
        heads, tiles = fields["head"][start:end], fields["tile"][start:end]
        for kv_head in range(HEADS.kv):
            of_head = tiles[heads // (HEADS.query // HEADS.kv) == kv_head]
            assert (np.diff(of_head) <= 0).all()


def test_more_than_fits_is_refused() -> None:
    """Red if a schedule beyond its capacity overwrites the next field."""
    schedule = TileSchedule(HEADS, 1, 128, grid=GRID, sms=GRID)
    with pytest.raises(ValueError, match="8 tiles; there is room for 4"):
        schedule.fill(np.zeros(schedule.words, np.int32), np.array([129]), Span(np.array([0]), np.array([129]), True))
