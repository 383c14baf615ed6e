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


ROOM_TO_GROW = 32
"""Pages left free behind a sequence, as long as there are any, so that it can go on where it is."""
RUNS_TRIED = 8


class PageError(Exception):
    """A transition that the page's state doesn't allow."""


class PagePool:
    """`total` pages, numbered from 0. Arrays of pages passed in hold each page once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._is_free = np.ones(total + 1, np.bool_)
        self._is_free[total] = False
        self._cursor = 0
        """Where the search for the next run begins."""
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

        Contiguous where that can be had cheaply: right behind the last page, else in one run with room to grow. Raises
        PageError when fewer pages are free: evict first.
        """
        if count > self.free:
            raise PageError(f"{count} pages were asked for; {self.free} are free")
        start = behind + 1 if behind >= 0 and self._run(behind + 1, count) == count else self._find_run(count)
        pages = np.arange(start, start + count, dtype=np.int32) if start >= 0 else self._gather(count)
        self._reference_free(pages)
        return pages

    def grow(self, last: Pages) -> Pages:
        """Reference one free page for each of several sequences, right behind its last one where that page is free."""
        if last.size > self.free:
            raise PageError(f"{last.size} pages were asked for; {self.free} are free")
        pages = last + 1
        placed = self._is_free[pages]
        if not placed.all():
            self._is_free[pages[placed]] = False
            for at in (~placed).nonzero()[0].tolist():
                pages[at] = page = self._find_free(self._cursor)
                self._cursor = page + ROOM_TO_GROW
                self._is_free[page] = False
        self._reference_free(pages)
        return pages

    def _find_free(self, start: int) -> int:
        """The first free page from `start` on, or from 0 on; there is one."""
        for origin in (min(start, self.total), 0):
            page = origin + int(self._is_free[origin:].argmax())
            if self._is_free[page]:
                return page
        raise PageError("no page is free")

    def _run(self, start: int, most: int) -> int:
        """How many pages are free in a row from `start` on, up to `most`."""
        used = ~self._is_free[start : start + most]
        return int(used.argmax()) if used.any() else used.size

    def _find_run(self, count: int) -> int:
        """Start of `count` free pages in a row, among the next few runs from the cursor on; -1: none of them is it."""
        start = self._cursor
        for _ in range(RUNS_TRIED if count else 0):
            start = self._find_free(start)
            length = self._run(start, count)
            if length == count:
                self._cursor = start + count + ROOM_TO_GROW
                return start
            start += length
        return -1

    def _gather(self, count: int) -> Pages:
        """Any `count` free pages, from the cursor on."""
        free = np.flatnonzero(self._is_free)
        first = int(np.searchsorted(free, self._cursor))
        return np.roll(free, -first)[:count].astype(np.int32)

    def _reference_free(self, pages: Pages) -> None:
        """Pages that the searches above have found free."""
        self._is_free[pages] = False
        self._state[pages] = REFERENCED
        self._references[pages] = 1
        self._counts[FREE] -= pages.size
        self._counts[REFERENCED] += pages.size

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
        if target == FREE:
            self._is_free[pages] = True
