"""The prefix cache: which full pages of accepted tokens can be found again, and under what.

Owns the index from hash chain links to pages. A hash only nominates: a page is used when its ids, its parent page and,
at the root, the salt are equal, so a frontend that lies about hashes can spoil its own hits and nobody's tokens. Knows
no fences: pages enter when the step that filled them is complete, and `PagePool` says when one may be evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from engine_core.cache.pages import PagePool


class CachedPage(msgspec.Struct, gc=False, eq=False):
    """A full page's place in the tree of prefixes.

    There are as many as pages, and the garbage collector needn't look at them: `PrefixCache` cuts a dropped one loose.
    """

    key: bytes
    page: int
    ids: bytes
    """int32 LE."""
    parent: CachedPage | None
    salt: bytes | None
    listed: bool = True
    """False once dropped: nothing can hang below it any more."""
    child: CachedPage | None = None
    """The newest page behind this one; the others follow as its siblings."""
    older: CachedPage | None = None
    newer: CachedPage | None = None

    def holds(self, parent: CachedPage | None, salt: bytes | None, ids: bytes) -> bool:
        """Whether this is exactly the page with `ids` behind `parent` (None: the salt's root)."""
        return self.parent is parent and self.ids == ids and self.salt == salt

    def hang(self) -> None:
        """Become the newest child of the parent."""
        if self.parent is not None:
            self.older = self.parent.child
            if self.older is not None:
                self.older.newer = self
            self.parent.child = self

    def cut(self) -> list[CachedPage]:
        """Leave the tree; returns the children, to be cut as well. Nothing refers to a dropped page's neighbours.

        So a long chain is freed page by page, not by one deep recursion.
        """
        if self.newer is not None:
            self.newer.older = self.older
        elif self.parent is not None and self.parent.child is self:
            self.parent.child = self.older
        if self.older is not None:
            self.older.newer = self.newer
        children: list[CachedPage] = []
        child, self.child = self.child, None
        while child is not None:
            children.append(child)
            child = child.older
        self.listed, self.parent, self.older, self.newer = False, None, None, None
        return children


class Watcher(Protocol):
    """Hears of every change. With no watcher, a change costs one look at an empty list."""

    def stored(self, pages: list[CachedPage]) -> None:
        """These can be found now, one behind the other."""

    def removed(self, link: bytes) -> None:
        """This one can be found no longer."""


class PrefixCache:
    """Pages by chain link. The caller refers to what `lookup` found by `PagePool.share` before anything else runs."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self.watchers: list[Watcher] = []

    def __len__(self) -> int:
        return len(self._by_key)

    def pages(self) -> Iterable[CachedPage]:
        """All that can be found, parents first."""
        return self._by_key.values()

    def find(self, parent: CachedPage | None, salt: bytes | None, key: bytes, ids: bytes) -> CachedPage | None:
        """The page that follows `parent` with exactly these ids, or None."""
        entry = self._by_key.get(key)
        return entry if entry is not None and entry.holds(parent, salt, ids) else None

    def publish(
        self, parent: CachedPage | None, salt: bytes | None, links: list[bytes], ids: list[bytes], pages: list[int]
    ) -> list[CachedPage]:
        """Make full pages findable, one behind the other from `parent` on.

        Their tokens are accepted and their steps complete. Returns the entries that now stand for these tokens: where
        an equal one was there before, `page` stays its owner's own. Fewer than asked for: the chain ends there, because
        the parent is gone or other tokens hold the link.
        """
        entries: list[CachedPage] = []
        new: list[CachedPage] = []
        by_key, by_page = self._by_key, self._by_page
        if parent is not None and not parent.listed:
            return entries
        for key, page_ids, page in zip(links, ids, pages, strict=True):
            entry = by_key.get(key)
            if entry is None:
                entry = CachedPage(key, page, page_ids, parent, salt)
                self._pool.keep(page)
                by_key[key] = by_page[page] = entry
                entry.hang()
                new.append(entry)
            elif not entry.holds(parent, salt, page_ids):
                break
            entries.append(entry)
            parent = entry
        for watcher in self.watchers if new else ():
            watcher.stored(new)
        return entries

    def evict(self, count: int) -> None:
        """Free at least `count` cached pages, least recently given back first, as far as there are any."""
        goal = self._pool.free + count
        while self._pool.free < goal and (page := self._pool.least_recent()) is not None:
            self._drop(self._by_page[page])

    def flush(self) -> int:
        """Drop every page that no sequence refers to; returns how many became free."""
        before = self._pool.free
        self.evict(self._pool.cached)
        return self._pool.free - before

    def _drop(self, entry: CachedPage) -> None:
        """Forget a page and all behind it, which could never be found again."""
        doomed = [entry]
        while doomed:
            gone = doomed.pop()
            doomed += gone.cut()
            del self._by_key[gone.key], self._by_page[gone.page]
            self._pool.forget(gone.page)
            for watcher in self.watchers:
                watcher.removed(gone.key)
