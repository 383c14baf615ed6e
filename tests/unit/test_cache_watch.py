"""What readers of the prefix cache are told: every page, parents first, and every change, or that they fell behind."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from greenlane.engine.v1 import engine_pb2 as pb

from engine_core import cache_stream
from engine_core.cache import watch as watching
from engine_core.cache.pages import PagePool
from engine_core.cache.prefix import CachedPage, PrefixCache
from engine_core.cache.watch import CacheWatch, RemovedPages, StoredPages
from engine_core.errors import StatusCode
from engine_core.request import prefix_chain
from engine_core.session import SessionBroken

PAGE = 4
WIDTH = 4 * PAGE


class Cached:
    """A prefix cache whose pages all belong to nobody once they are published, and readers of it."""

    def __init__(self, pages: int = 256) -> None:
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool)

    def store(self, tokens: list[int], salt: bytes | None = None) -> list[bytes]:
        """Publish a prompt's pages; their links."""
        chain = prefix_chain(np.array(tokens, np.int32), PAGE, salt)
        links = [chain[at : at + 32] for at in range(0, len(chain), 32)]
        ids = [np.array(tokens[at : at + PAGE], "<i4").tobytes() for at in range(0, PAGE * len(links), PAGE)]
        self.cache.evict(max(0, len(links) - self.pool.free))
        pages = self.pool.allocate(len(links))
        self.cache.publish(None, salt, links, ids, pages.tolist())
        self.pool.retire(pages, {})
        return links

    def watch(self) -> CacheWatch:
        watch = CacheWatch(self.cache.pages())
        self.cache.watchers.append(watch)
        return watch

    def held(self) -> dict[bytes, bytes]:
        return {entry.key: entry.ids for entry in self.cache.pages()}


class Reader:
    """Believes what it is told; no page may come before its parent."""

    def __init__(self, watch: CacheWatch) -> None:
        self.watch = watch
        self.pages: dict[bytes, bytes] = {}

    def read(self, most: int = 1 << 20) -> None:
        for change in self.watch.read(most):
            if isinstance(change, RemovedPages):
                for link in change.links:
                    self.pages.pop(link, None)
                continue
            assert change.parent is None or change.parent in self.pages
            self.pages.update(zip(change.links, change.ids, strict=True))


@pytest.fixture
def cached() -> Cached:
    return Cached()


FIRST = list(range(100, 112))


def test_pages_that_are_there_and_those_that_come(cached: Cached) -> None:
    """Red when a reader isn't told of pages from before its start, or a chain isn't told as one."""
    early = cached.store(FIRST)
    watch = cached.watch()
    late = cached.store([*FIRST[:8], 1, 2, 3, 4], salt=None)
    salted = cached.store(FIRST[:4], b"tenant")
    first, second, third = watch.read(100)
    assert isinstance(first, StoredPages)
    assert (first.parent, first.salt, first.links) == (None, None, early)
    assert b"".join(first.ids) == np.array(FIRST, "<i4").tobytes()
    assert isinstance(second, StoredPages)
    assert (second.parent, second.links) == (early[1], late[2:])
    assert isinstance(third, StoredPages)
    assert (third.parent, third.salt, third.links) == (None, b"tenant", salted)
    assert watch.read(100) == []


def test_pages_that_go(cached: Cached) -> None:
    """Red when a removal isn't told, or a page is told that is gone already."""
    links = cached.store(FIRST)
    watch = cached.watch()
    watch.read(100)
    cached.cache.flush()
    again = cached.store(FIRST)
    cached.cache.flush()
    assert again == links
    first, *rest = watch.read(100)
    assert isinstance(first, RemovedPages)
    assert set(first.links) == set(links)
    assert all(isinstance(change, RemovedPages) for change in rest)
    assert watch.read(100) == []


def test_any_history_read_in_any_pieces(cached: Cached) -> None:
    """Red when some order of stores, evictions and readings leaves a reader with other pages than there are."""
    chance = random.Random(7)
    prompts = [[chance.randrange(3) for _ in range(PAGE * chance.randrange(1, 9))] for _ in range(60)]
    readers: list[Reader] = []
    for _ in range(600):
        match chance.randrange(6):
            case 0 | 1 | 2:
                cached.store(chance.choice(prompts), chance.choice((None, b"a")))
            case 3:
                cached.cache.evict(chance.randrange(12))
            case 4 if len(readers) < 5:
                readers.append(Reader(cached.watch()))
            case _:
                for reader in readers:
                    reader.read(chance.randrange(1, 20))
    for reader in readers:
        reader.read()
        assert reader.pages == cached.held()
    assert len(cached.cache) > 10


def test_a_reader_who_stays_behind(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a reader who doesn't read fills the memory, or goes on as if it had heard everything."""
    monkeypatch.setattr(watching, "MAX_BEHIND", 5)
    cached.store(FIRST)
    watch = cached.watch()
    cached.store([1] * PAGE * 5)
    assert (watch.lost, len(watch)) == (False, 8)
    cached.store([2] * PAGE)
    assert (watch.lost, len(watch)) == (True, 0)
    cached.store([3] * PAGE)
    assert len(watch) == 0


def test_nobody_watching_costs_nothing(cached: Cached) -> None:
    """Red when changes are kept for nobody: a page that was dropped must be gone."""
    cached.store(FIRST)
    (entry, *_) = list(cached.cache.pages())
    cached.cache.flush()
    assert isinstance(entry, CachedPage)
    assert not entry.listed
    assert cached.cache.watchers == []


# ------------------------------ as messages


class HeldCore:
    """Reads at once, on this thread."""

    async def read_cache(self, watch: CacheWatch, most: int) -> list[StoredPages | RemovedPages]:
        self.most = most
        return watch.read(most)


async def test_messages_are_bounded(cached: Cached) -> None:
    """Red when a full cache leaves in one message, larger than its reader takes, or an end isn't one."""
    for prompt in range(200):
        cached.store([prompt] * PAGE, b"s" * 256)
    core, ended = HeldCore(), asyncio.Event()
    watch, page_size = cached.watch(), 1 << 12
    messages: list[pb.CacheChanges] = []
    async for message in cache_stream.changes(core, watch, page_size, ended):
        messages.append(message)
        if not len(watch):
            ended.set()
    assert sum(len(message.changes) for message in messages) == 200
    assert len(messages) > 10
    fullest = core.most * (4 * page_size - WIDTH) + max(message.ByteSize() for message in messages)
    assert fullest <= cache_stream.PIECE_BYTES
    assert messages[0].changes[0].stored.cache_salt == "s" * 256


async def test_a_slow_reader_is_told_to_begin_anew(cached: Cached) -> None:
    """Red when a reader that missed something isn't told."""
    watch = cached.watch()
    watch.lost = True
    with pytest.raises(SessionBroken) as broken:
        await anext(cache_stream.changes(HeldCore(), watch, PAGE, asyncio.Event()))
    assert broken.value.code is StatusCode.DATA_LOSS
