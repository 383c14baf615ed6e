"""The prefix cache: which full pages of accepted tokens can be found again, and under what.

Owns the index from hash chain links to pages. A hash only nominates: a page is used when its ids, its parent page and,
at the root, the salt are equal, so a frontend that lies about hashes can spoil its own hits and nobody's tokens. Knows
no fences: pages enter when the step that filled them is complete, and `PagePool` says when one may be evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.cache.pages import PagePool


@dataclass(slots=True, eq=False)
class CachedPage:
    """A full page's place in the tree of prefixes."""

    key: bytes
    page: int
    ids: bytes
    """int32 LE."""
    parent: CachedPage | None
    salt: bytes | None
    children: dict[int, CachedPage] | None = None
    """By page; None while there are none, as at the end of every chain."""
    listed: bool = True
    """False once dropped: nothing can hang below it any more."""

    def holds(self, parent: CachedPage | None, salt: bytes | None, ids: bytes) -> bool:
        """Whether this is exactly the page with `ids` behind `parent` (None: the salt's root)."""
        return self.parent is parent and self.ids == ids and self.salt == salt


class PrefixCache:
    """Pages by chain link. The caller refers to what `lookup` found by `PagePool.share` before anything else runs."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._by_key: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, parent: CachedPage | None, salt: bytes | None, key: bytes, ids: bytes) -> CachedPage | None:
        """The page that follows `parent` with exactly these ids, or None."""
        entry = self._by_key.get(key)
        return entry if entry is not None and entry.holds(parent, salt, ids) else None

    def publish(
        self, parent: CachedPage | None, salt: bytes | None, key: bytes, ids: bytes, page: int
    ) -> CachedPage | None:
        """Make a full page findable behind `parent`; its tokens are accepted and its step is complete.

        Returns the entry that now stands for these tokens: an equal one may have been there before, then `page` stays
        its owner's own. None when the chain ends here: the parent is gone, or other tokens hold the key.
        """
        if parent is not None and not parent.listed:
            return None
        known = self._by_key.get(key)
        if known is not None:
            return known if known.holds(parent, salt, ids) else None
        entry = CachedPage(key, page, ids, parent, salt)
        self._pool.keep(page)
        self._by_key[key] = entry
        self._by_page[page] = entry
        if parent is not None:
            if parent.children is None:
                parent.children = {}
            parent.children[page] = entry
        return entry

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
        if entry.parent is not None and entry.parent.children is not None:
            entry.parent.children.pop(entry.page, None)
        doomed = [entry]
        while doomed:
            gone = doomed.pop()
            gone.listed = False
            doomed.extend((gone.children or {}).values())
            gone.children = None
            del self._by_key[gone.key], self._by_page[gone.page]
            self._pool.forget(gone.page)
