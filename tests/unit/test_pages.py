"""The page pool's states, fences and placement, as values."""

from __future__ import annotations

import numpy as np
import pytest

from engine_core.cache.pages import ROOM_TO_GROW, PageError, PagePool, Pages, PageState
from engine_core.step import Lane

PRIMARY, PREFILL = Lane.PRIMARY, Lane.PREFILL


def counts(pool: PagePool) -> tuple[int, int, int, int]:
    """(free, cached, referenced, retiring); red when they don't add up."""
    assert pool.free + pool.cached + pool.referenced + pool.retiring == pool.total
    return pool.free, pool.cached, pool.referenced, pool.retiring


def published(pool: PagePool, count: int) -> Pages:
    """Pages of one sequence, all known to the prefix cache."""
    pages = pool.allocate(count)
    for page in pages.tolist():
        pool.keep(page)
    return pages


def test_a_page_goes_round() -> None:
    """Red when a state is skipped on the way out or back."""
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert counts(pool) == (1, 0, 3, 0)
    pool.retire(pages, {PRIMARY: 5})
    assert counts(pool) == (1, 0, 0, 3)
    pool.complete({PRIMARY: 5, PREFILL: 0})
    assert counts(pool) == (4, 0, 0, 0)


def test_pages_wait_for_every_lane() -> None:
    """Rule O12. Red when one lane's proof frees what another may still touch."""
    pool = PagePool(2)
    pool.retire(pool.allocate(2), {PRIMARY: 3, PREFILL: 2})
    for proof in ({PRIMARY: 2, PREFILL: 2}, {PRIMARY: 9, PREFILL: 1}, {PRIMARY: 2, PREFILL: 1}):
        pool = PagePool(2)
        pool.retire(pool.allocate(2), {PRIMARY: 3, PREFILL: 2})
        pool.complete(proof)
        assert counts(pool) == (0, 0, 0, 2), proof
    pool.complete({PRIMARY: 3, PREFILL: 2})
    assert pool.free == 2


def test_proofs_add_up() -> None:
    """Red when a later proof of one lane forgets an earlier one of the other."""
    pool = PagePool(1)
    pool.retire(pool.allocate(1), {PRIMARY: 3, PREFILL: 2})
    pool.complete({PRIMARY: 3})
    pool.complete({PREFILL: 2})
    assert pool.free == 1


def test_a_fence_that_has_passed_doesn_t_hold() -> None:
    """Red when pages without work in flight wait for a step that nobody will submit."""
    pool = PagePool(1)
    pool.complete({PRIMARY: 7, PREFILL: 0})
    pool.retire(pool.allocate(1), {PRIMARY: 7, PREFILL: 0})
    assert pool.free == 1


def test_the_latest_fence_of_a_shared_page_holds() -> None:
    """Red when the last owner's own fence frees a page that an earlier owner's step still reads."""
    pool = PagePool(1)
    pages = published(pool, 1)
    pool.share(pages)
    pool.retire(pages, {PREFILL: 9})
    pool.retire(pages, {PRIMARY: 1})
    pool.complete({PRIMARY: 1, PREFILL: 8})
    assert counts(pool) == (0, 0, 0, 1)
    pool.complete({PREFILL: 9})
    assert counts(pool) == (0, 1, 0, 0)


def test_a_retiring_page_can_be_shared_again() -> None:
    """Red when a prefix hit during retirement loses the page at the fence, or counts it twice."""
    pool = PagePool(2)
    pages = published(pool, 2)
    pool.retire(pages, {PRIMARY: 1})
    pool.share(pages[:1])
    assert counts(pool) == (0, 0, 1, 1)
    pool.complete({PRIMARY: 1})
    assert counts(pool) == (0, 1, 1, 0)
    pool.retire(pages[:1], {PRIMARY: 1})
    assert counts(pool) == (0, 2, 0, 0)


def test_cached_pages_leave_from_the_end_of_the_oldest() -> None:
    """Red when eviction takes a prefix before what hangs behind it, or a recent sequence before an old one."""
    pool = PagePool(5)
    old, new = published(pool, 3), published(pool, 2)
    pool.retire(new, {})
    pool.share(new)
    pool.retire(old, {})
    pool.retire(new, {})
    order = []
    while (page := pool.least_recent()) is not None:
        order.append(page)
        pool.forget(page)
    assert order == [*old.tolist()[::-1], *new.tolist()[::-1]]
    assert counts(pool) == (5, 0, 0, 0)


def test_forgetting_a_held_page_frees_it_when_it_comes_back() -> None:
    """Red when a page dropped from the prefix cache is taken from its owner, or cached afterwards."""
    pool = PagePool(1)
    pages = published(pool, 1)
    pool.forget(int(pages[0]))
    assert pool.state(int(pages[0])) is PageState.REFERENCED
    pool.retire(pages, {})
    assert counts(pool) == (1, 0, 0, 0)


def test_illegal_transitions_raise() -> None:
    """Red when a bug of the caller goes on to corrupt somebody's KV."""
    pool = PagePool(3)
    pages = pool.allocate(2)
    with pytest.raises(PageError):
        pool.allocate(2)
    with pytest.raises(PageError):
        pool.share(pages)
    with pytest.raises(PageError):
        pool.forget(int(pages[0]))
    pool.keep(int(pages[0]))
    with pytest.raises(PageError):
        pool.keep(int(pages[0]))
    with pytest.raises(PageError):
        pool.keep(2)
    pool.retire(pages, {PRIMARY: 1})
    with pytest.raises(PageError):
        pool.retire(pages, {PRIMARY: 1})
    with pytest.raises(PageError):
        pool.grow(np.array([0, 1], np.int32))
    assert counts(pool) == (1, 0, 0, 2)


def test_sequences_get_runs_with_room_behind() -> None:
    """Red when a prompt is scattered, or the next one is put right behind it although there is room elsewhere."""
    pool = PagePool(4 * ROOM_TO_GROW)
    first, second = pool.allocate(4), pool.allocate(4)
    assert np.diff(first).tolist() == np.diff(second).tolist() == [1, 1, 1]
    for _ in range(8):
        grown = pool.grow(np.array([first[-1], second[-1]], np.int32))
        assert grown.tolist() == [first[-1] + 1, second[-1] + 1]
        first, second = np.append(first, grown[0]), np.append(second, grown[1])


def test_a_prompt_continues_behind_its_cached_pages() -> None:
    pool = PagePool(100)
    cached = pool.allocate(3)
    assert pool.allocate(2, behind=int(cached[-1])).tolist() == [3, 4]


@pytest.mark.parametrize("behind", [-1, 9])
def test_fragments_are_used_up(behind: int) -> None:
    """Red when pages that are free can't be had because they don't lie together, or one is handed out twice."""
    pool = PagePool(10)
    pages = pool.allocate(10)
    pool.retire(np.sort(pages)[::2], {})
    taken = pool.allocate(3, behind=behind).tolist() + pool.grow(np.array([9, 5], np.int32)).tolist()
    assert sorted(taken) == [0, 2, 4, 6, 8]
    assert pool.allocate(0).size == 0
