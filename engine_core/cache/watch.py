"""What a reader of the prefix cache hasn't been told yet: its pages first, then what appears and goes.

Owns the order and the bound. Noting a change costs an append; pages that came and went before anybody was told are
skipped. Nothing here walks the cache but the start, which copies one reference a page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from engine_core.cache.prefix import CachedPage

MAX_BEHIND = 1 << 15
"""Changes that may wait for a reader, beside the pages that were there at its start."""


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Pages that can be found now, one behind the other."""

    parent: bytes | None
    """Link of the page before the first of these; None: they begin a prompt."""
    salt: bytes | None
    links: list[bytes]
    ids: list[bytes]
    """int32 LE, beside `links`."""


@dataclass(frozen=True, slots=True)
class RemovedPages:
    """Pages that can be found no longer. A reader may be told of pages here that it never heard of."""

    links: list[bytes]


class CacheWatch:
    """One reader's place. Parents are told before their children."""

    def __init__(self, pages: Iterable[CachedPage]) -> None:
        """`pages`: those that there are, parents first."""
        self._untold: deque[CachedPage | bytes] = deque(pages)
        self._most = len(self._untold) + MAX_BEHIND
        self.lost = False
        """The reader fell so far behind that changes were dropped: it has to begin anew."""

    def __len__(self) -> int:
        """What is still to be told, dead pages included. May be asked on any thread."""
        return len(self._untold)

    def stored(self, pages: list[CachedPage]) -> None:
        self._note(pages)

    def removed(self, link: bytes) -> None:
        self._note((link,))

    def _note(self, changes: Iterable[CachedPage | bytes]) -> None:
        if not self.lost:
            self._untold.extend(changes)
            if len(self._untold) > self._most:
                self.lost = True
                self._untold.clear()

    def read(self, most: int) -> list[StoredPages | RemovedPages]:
        """The oldest `most` changes, in order and with chains joined; each is told once."""
        told: list[StoredPages | RemovedPages] = []
        last: CachedPage | None = None
        for _ in range(min(most, len(self._untold))):
            change = self._untold.popleft()
            if isinstance(change, bytes):
                _join_removed(told, change)
                last = None
            elif change.listed:  # one that is gone already has its removal behind it
                _join_stored(told, change, last)
                last = change
        return told


def _join_removed(told: list[StoredPages | RemovedPages], link: bytes) -> None:
    if told and isinstance(told[-1], RemovedPages):
        told[-1].links.append(link)
    else:
        told.append(RemovedPages([link]))


def _join_stored(told: list[StoredPages | RemovedPages], page: CachedPage, last: CachedPage | None) -> None:
    """`last`: the page that the last of `told` ends with."""
    run = told[-1] if told else None
    if last is None or page.parent is not last or not isinstance(run, StoredPages):
        run = StoredPages(None if page.parent is None else page.parent.key, page.salt, [], [])
        told.append(run)
    run.links.append(page.key)
    run.ids.append(page.ids)
