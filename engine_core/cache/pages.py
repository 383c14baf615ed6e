"""The KV cache's pages: who may touch each one, as explicit states.

Owns allocation, reference counts and the way back. Knows neither requests nor contents (`prefix.py` knows those). An
illegal transition raises `PageError`: it's a bug of the caller, and going on would corrupt somebody's KV.

    free → referenced → retiring → free                    a page of one sequence
                        retiring → cached → free           one that the prefix cache keeps until it is evicted
           referenced ← retiring, cached                   a prefix hit

free + cached + referenced + retiring = total, always.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from engine_core.cache.retire import RetireQueue
from engine_core.step import Lane

Pages = npt.NDArray[np.int32]


class PageState(enum.IntEnum):
    FREE = 0
    REFERENCED = 1
    """In the table of at least one sequence."""
    RETIRING = 2
    """In no table, but a lane may still touch it: neither free nor evictable."""
    CACHED = 3
    """In no table, proven untouched, kept for the prefix cache."""


FREE, REFERENCED, RETIRING, CACHED = (int(state) for state in PageState)
"""For the arrays: numpy compares plain ints faster."""


class PageError(Exception):
    """A transition that the page's state doesn't allow."""


class PagePool:
    """`total` pages, numbered from 0. Arrays of pages passed in hold each page once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._bordered_free = np.zeros(total + 2, np.bool_)
        self._bordered_free[1:-1] = True
        self._is_free = self._bordered_free[1:-1]
        self._state = np.full(total, FREE, np.uint8)
        self._counts = [total, 0, 0, 0]
        self._references = np.zeros(total, np.int32)
        self._fenced = np.zeros(total, np.int32)
        """References given back whose fences haven't been reached."""
        self._kept = np.zeros(total, np.bool_)
        """Pages that the prefix cache knows."""
        self._least_recent: OrderedDict[int, None] = OrderedDict()
        self._retired: RetireQueue[Pages] = RetireQueue()

    # -------------------------- counts

    @property
    def free(self) -> int:
        return self._counts[FREE]

    @property
    def cached(self) -> int:
        return self._counts[CACHED]

    @property
    def referenced(self) -> int:
        return self._counts[REFERENCED]

    @property
    def retiring(self) -> int:
        return self._counts[RETIRING]

    @property
    def available(self) -> int:
        """Pages that can be had now: free ones and those that the prefix cache would give up."""
        return self.free + self.cached

    def state(self, page: int) -> PageState:
        return PageState(int(self._state[page]))

    def count_cached(self, pages: Pages) -> int:
        """How many of these count as `cached`."""
        return int(np.count_nonzero(self._state[pages] == CACHED))

    # -------------------------- out

    def allocate(self, count: int, behind: int = -1) -> Pages:
        """Reference `count` free pages for one sequence, whose last page so far is `behind` (-1: none).

        Contiguous where that can be had: right behind the last page, else within the longest free run. A run is
        entered in its middle, so that the sequence before it keeps room to grow, too. Raises PageError when fewer
        pages are free: evict first.
        """
        if count > self.free:
            raise PageError(f"{count} pages were asked for; {self.free} are free")
        following = self._is_free[behind + 1 : behind + 1 + count]
        if behind >= 0 and following.size == count and following.all():
            pages = np.arange(behind + 1, behind + 1 + count, dtype=np.int32)
        else:
            pages = self._from_runs(count)
        self._reference_free(pages)
        return pages

    def grow(self, last: Pages) -> Pages:
        """Reference one free page for each of several sequences, right behind its last one where that page is free."""
        if last.size > self.free:
            raise PageError(f"{last.size} pages were asked for; {self.free} are free")
        pages = last + 1
        placed = self._bordered_free[1:][pages]
        self._reference_free(pages[placed])
        if not placed.all():
            pages[~placed] = scattered = self._scatter(int(np.count_nonzero(~placed)))
            self._reference_free(scattered)
        return pages

    def _free_runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Starts and lengths of the maximal runs of free pages, longest first."""
        border = self._bordered_free
        edges = np.flatnonzero(border[1:] != border[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        order = np.argsort(-lengths, kind="stable")
        return starts[order], lengths[order]

    def _from_runs(self, count: int) -> Pages:
        if count == 0:
            return np.empty(0, np.int32)
        starts, lengths = self._free_runs()
        if lengths[0] >= count:
            start = int(starts[0] + (int(lengths[0]) - count) // 2 * (starts[0] > 0))
            return np.arange(start, start + count, dtype=np.int32)
        runs = int(np.searchsorted(np.cumsum(lengths), count)) + 1
        whole = [np.arange(s, s + n) for s, n in zip(starts[:runs].tolist(), lengths[:runs].tolist(), strict=True)]
        return np.concatenate(whole)[:count].astype(np.int32)

    def _scatter(self, count: int) -> Pages:
        """Free pages for `count` sequences that each start a new run, with room behind as far as there is any."""
        starts, lengths = self._free_runs()
        picked = (starts + lengths // 2 * (starts > 0))[:count]
        if picked.size < count:
            rest = np.setdiff1d(np.flatnonzero(self._is_free), picked, assume_unique=True)
            picked = np.concatenate((picked, rest[: count - picked.size]))
        return picked.astype(np.int32)

    def _reference_free(self, pages: Pages) -> None:
        self._move(pages, FREE, REFERENCED)
        self._references[pages] = 1

    def share(self, pages: Pages) -> None:
        """Another sequence refers to these pages of the prefix cache; they may be cached, retiring or referenced."""
        if not self._kept[pages].all():
            raise PageError("a page that the prefix cache doesn't know can't be shared")
        states = self._state[pages]
        for page in pages[states == CACHED].tolist():
            del self._least_recent[page]
        self._move(pages[states == CACHED], CACHED, REFERENCED)
        self._move(pages[states == RETIRING], RETIRING, REFERENCED)
        self._references[pages] += 1

    # -------------------------- back

    def retire(self, pages: Pages, after: Mapping[Lane, int]) -> None:
        """A sequence gives its references back; they end when every lane's proof has reached `after` (rule O12).

        Pages in order of position: those of the prefix cache become evictable from the last to the first.
        """
        if not (self._references[pages] > 0).all():
            raise PageError("a page was given back that no sequence refers to")
        self._references[pages] -= 1
        self._fenced[pages] += 1
        self._move(pages[self._references[pages] == 0], REFERENCED, RETIRING)
        for proven in self._retired.retire(pages, after):
            self._release(proven)

    def complete(self, proof: Mapping[Lane, int]) -> None:
        """The lanes are proven done up to these sequences."""
        for proven in self._retired.complete(proof):
            self._release(proven)

    def _release(self, pages: Pages) -> None:
        self._fenced[pages] -= 1
        done = pages[(self._fenced[pages] == 0) & (self._references[pages] == 0)]
        kept = self._kept[done]
        self._move(done[~kept], RETIRING, FREE)
        self._move(done[kept], RETIRING, CACHED)
        for page in done[kept][::-1].tolist():
            self._least_recent[page] = None

    # -------------------------- the prefix cache's hold

    def keep(self, page: int) -> None:
        """The prefix cache knows this referenced page from now on."""
        if self._state.item(page) != REFERENCED or self._kept[page]:
            raise PageError(f"page {page} can't be published: {self.state(page).name}, kept: {self._kept[page]}")
        self._kept[page] = True

    def forget(self, page: int) -> None:
        """The prefix cache has dropped this page: a cached one is free now, another when it's given back."""
        if not self._kept[page]:
            raise PageError(f"page {page} isn't in the prefix cache")
        self._kept[page] = False
        if self._state.item(page) == CACHED:
            del self._least_recent[page]
            self._move(np.array([page], np.int32), CACHED, FREE)

    def least_recent(self) -> int | None:
        """The cached page that was given back longest ago, or None."""
        return next(iter(self._least_recent), None)

    def _move(self, pages: Pages, source: int, target: int) -> None:
        if pages.size == 0:
            return
        if not (self._state[pages] == source).all():
            raise PageError(f"a page isn't {PageState(source).name} and can't become {PageState(target).name}")
        self._state[pages] = target
        self._counts[source] -= pages.size
        self._counts[target] += pages.size
        if source == FREE or target == FREE:
            self._is_free[pages] = target == FREE
