"""The prefix cache: only exactly equal beginnings are found, and nothing unreachable is kept."""

from __future__ import annotations

import numpy as np
import pytest

from engine_core.cache.pages import PagePool, Pages
from engine_core.cache.prefix import CachedPage, PrefixCache
from engine_core.request import prefix_chain

PAGE = 4


class Owner:
    """A sequence that owns pages and publishes them."""

    def __init__(self, pool: PagePool, cache: PrefixCache, tokens: list[int], salt: bytes | None = None) -> None:
        self.ids = [np.array(tokens[at : at + PAGE], "<i4").tobytes() for at in range(0, len(tokens) - PAGE + 1, PAGE)]
        chain = prefix_chain(np.array(tokens, np.int32), PAGE, salt)
        self.keys = [chain[at : at + 32] for at in range(0, len(chain), 32)]
        self.salt = salt
        self.pool, self.cache = pool, cache
        self.pages: Pages = np.empty(0, np.int32)

    def publish(self) -> list[CachedPage]:
        self.pages = self.pool.allocate(len(self.ids))
        return self.cache.publish(None, self.salt, self.keys, self.ids, self.pages.tolist())

    def publish_one(self, at: int, parent: CachedPage | None) -> list[CachedPage]:
        """Only one of its pages, in a page of its own."""
        page = self.pool.allocate(1).tolist()
        return self.cache.publish(parent, self.salt, self.keys[at : at + 1], self.ids[at : at + 1], page)

    def find(self, keys: list[bytes] | None = None) -> list[int]:
        """Pages found for this beginning, under its own chain or a claimed one."""
        parent: CachedPage | None = None
        found = []
        for key, ids in zip(self.keys if keys is None else keys, self.ids, strict=True):
            parent = self.cache.find(parent, self.salt, key, ids)
            if parent is None:
                break
            found.append(parent.page)
        return found

    def give_back(self) -> None:
        self.pool.retire(self.pages, {})


@pytest.fixture
def pool() -> PagePool:
    return PagePool(32)


@pytest.fixture
def cache(pool: PagePool) -> PrefixCache:
    return PrefixCache(pool)


FIRST = list(range(100, 112))


def test_equal_beginnings_are_found(pool: PagePool, cache: PrefixCache) -> None:
    owner = Owner(pool, cache, FIRST)
    owner.publish()
    assert Owner(pool, cache, FIRST).find() == owner.pages.tolist()
    assert Owner(pool, cache, [*FIRST[:8], 1, 2, 3, 4]).find() == owner.pages[:2].tolist()
    assert Owner(pool, cache, [1, *FIRST[1:]]).find() == []


@pytest.mark.parametrize(("mine", "theirs"), [(None, b""), (b"", None), (b"a", b"b"), (None, b"\x00"), (b"a", None)])
def test_salts_separate(pool: PagePool, cache: PrefixCache, mine: bytes | None, theirs: bytes | None) -> None:
    """Case 23. Red when one tenant's salt, or its absence, names another's pages, even under the other's own hashes."""
    owner = Owner(pool, cache, FIRST, mine)
    owner.publish()
    thief = Owner(pool, cache, FIRST, theirs)
    assert thief.find() == []
    assert thief.find(owner.keys) == []


def test_a_lie_about_hashes_finds_nothing(pool: PagePool, cache: PrefixCache) -> None:
    """Red when ids aren't compared: claiming another prompt's hashes would read its KV."""
    owner = Owner(pool, cache, FIRST)
    owner.publish()
    assert Owner(pool, cache, list(range(200, 212))).find(owner.keys) == []
    assert Owner(pool, cache, [*FIRST[:4], *range(200, 208)]).find(owner.keys) == owner.pages[:1].tolist()


def test_a_lie_about_the_past_finds_nothing(pool: PagePool, cache: PrefixCache) -> None:
    """Red when a page is recognized by its own ids and key alone: its KV depends on all pages before it.

    The liar publishes its own first page under a key of nobody, and the honest second page behind it under the honest
    key. An honest reader must not take that second page, whose KV was computed after other tokens.
    """
    liar = Owner(pool, cache, [*range(200, 204), *FIRST[4:8]])
    honest = Owner(pool, cache, FIRST[:8])
    liar.keys = [b"?" * 32, honest.keys[1]]
    liar.publish()
    (first,) = honest.publish_one(0, None)
    assert honest.find() == [first.page]
    assert honest.publish_one(1, first) == []
    assert honest.publish() == [first]


def test_the_same_tokens_twice_keep_one_page(pool: PagePool, cache: PrefixCache) -> None:
    """Red when a duplicate replaces a page that others may refer to; the second owner's pages stay its own."""
    first, second = Owner(pool, cache, FIRST), Owner(pool, cache, FIRST)
    first.publish()
    entries = second.publish()
    assert [entry.page for entry in entries] == first.pages.tolist()
    second.give_back()
    assert (pool.cached, pool.free) == (0, 32 - 3)
    assert second.find() == first.pages.tolist()


def test_eviction_frees_the_least_recent_first(pool: PagePool, cache: PrefixCache) -> None:
    old, new = Owner(pool, cache, FIRST), Owner(pool, cache, list(range(300, 312)))
    for owner in (old, new):
        owner.publish()
        owner.give_back()
    cache.evict(2)
    assert (old.find(), new.find()) == (old.pages[:1].tolist(), new.pages.tolist())
    assert (pool.free, pool.cached) == (32 - 4, 4)


def test_dropping_a_page_drops_what_hangs_behind_it(pool: PagePool, cache: PrefixCache) -> None:
    """Red when an unreachable page stays cached for ever, or one in use is taken from its owner."""
    base, longer = Owner(pool, cache, FIRST[:4]), Owner(pool, cache, FIRST)
    base.publish()
    longer.publish()
    base.give_back()
    assert pool.cached == 1
    cache.evict(1)
    assert len(cache) == 0
    assert pool.referenced == 3
    longer.give_back()
    assert (pool.free, pool.cached) == (32, 0)


def test_nothing_hangs_below_a_dropped_page(pool: PagePool, cache: PrefixCache) -> None:
    """Red when a sequence goes on publishing behind a page that is gone."""
    owner = Owner(pool, cache, FIRST)
    entries = owner.publish()
    owner.give_back()
    cache.flush()
    assert owner.publish_one(0, entries[-1]) == []
    assert len(cache) == 0


def test_siblings_leave_one_by_one(pool: PagePool, cache: PrefixCache) -> None:
    """Red when dropping one branch loses another: its pages could neither be found nor dropped with their parent."""
    base = Owner(pool, cache, FIRST[:4])
    base.publish()
    branches = [Owner(pool, cache, [*FIRST[:4], *range(at, at + 4)]) for at in (400, 500, 600)]
    for branch in branches:
        branch.publish()
    branches[1].give_back()
    cache.evict(1)
    assert [len(branch.find()) for branch in branches] == [2, 1, 2]
    branches[2].give_back()
    cache.evict(1)
    assert [len(branch.find()) for branch in branches] == [2, 1, 1]
    for owner in (base, branches[0]):
        owner.give_back()
    cache.flush()
    assert len(cache) == 0
    assert pool.free == pool.total


def test_flush_counts_what_it_frees_and_spares_what_is_used(pool: PagePool, cache: PrefixCache) -> None:
    kept, dropped = Owner(pool, cache, FIRST), Owner(pool, cache, list(range(300, 312)))
    for owner in (kept, dropped):
        owner.publish()
    dropped.give_back()
    assert cache.flush() == 3
    assert (kept.find(), dropped.find()) == (kept.pages.tolist(), [])
    assert cache.flush() == 0


def test_a_long_chain_is_dropped_page_by_page() -> None:
    """Red when pages are freed through their parents: a million tokens of context would overflow the C stack."""
    count = 150_000
    pool = PagePool(count)
    cache = PrefixCache(pool)
    pages = pool.allocate(count)
    links = [page.to_bytes(32, "little") for page in range(count)]
    assert len(cache.publish(None, None, links, [b"ids"] * count, pages.tolist())) == count
    pool.retire(pages[:1], {})
    cache.evict(1)
    assert len(cache) == 0
