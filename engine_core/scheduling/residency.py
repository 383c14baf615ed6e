"""What a running sequence holds: its slot, its pages, and its place in the prefix cache.

Owns taking, growing, publishing and giving back, so that the three stay consistent. Decides neither who runs nor who
is preempted, and keeps no list of sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine_core.cache.pages import PagePool
from engine_core.cache.prefix import CachedPage, PrefixCache
from engine_core.cache.watch import CacheWatch
from engine_core.scheduling.rows import RowTable, Slots
from engine_core.scheduling.sequence import Sequence
from engine_core.step import Lane, RowStart


class Residency:
    """Slots and pages of the running sequences; `prefix` is None where prefix caching is off."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        page_size: int,
        total_pages: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        prefix_caching: bool,
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(total_pages)
        self.prefix = PrefixCache(self.pool) if prefix_caching else None
        self.rows = RowTable(max_num_seqs, page_size, min(total_pages, -(-max_model_len // page_size)))
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._eos_token_ids = eos_token_ids

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    # -------------------------- taking

    def lookup(self, sequence: Sequence) -> list[CachedPage]:
        """Pages of the prefix cache that hold the sequence's beginning; the last known token is never among them.

        It has to be computed for the next one to be drawn, and shared pages aren't written: so a prompt that fills its
        pages exactly recomputes the last one.
        """
        if self.prefix is None:
            return []
        found: list[CachedPage] = []
        parent: CachedPage | None = None
        for page in range(self._reusable_pages(sequence)):
            ids = sequence.page_ids(page, page + 1, self.page_size)
            (link,) = sequence.links_of(page, ids)
            parent = self.prefix.find(parent, sequence.request.salt, link, ids[0])
            if parent is None:
                break
            found.append(parent)
        return found

    def _reusable_pages(self, sequence: Sequence) -> int:
        """Full pages that needn't be computed. Prompt logprobs not yet published need their tokens computed."""
        tokens = sequence.stored - 1
        if sequence.params.prompt_logprobs >= 0 and sequence.described < sequence.prompt_len:
            tokens = min(tokens, sequence.described - 1)
        return tokens // self.page_size

    def missing(self, sequence: Sequence, hits: list[CachedPage]) -> int:
        """Pages beyond those available that entering with these hits takes; 0 or less: it fits."""
        cached_hits = self.pool.count_cached(_pages_of(hits))
        return self.pages_for(sequence.stored) - len(hits) - (self.pool.available - cached_hits)

    def enter(self, sequence: Sequence, hits: list[CachedPage]) -> RowStart:
        """Take a slot and pages for every id known so far. The caller has checked that both are there."""
        shared = _pages_of(hits)
        self.pool.share(shared)
        count = self.pages_for(sequence.stored) - len(hits)
        self._make_free(count)
        own = self.pool.allocate(count, behind=int(shared[-1]) if hits else -1)
        pages = np.concatenate((shared, own))
        cached = len(hits) * self.page_size
        stop_ids = sequence.stop_ids(self._eos_token_ids)
        sequence.slot = self.rows.enter(sequence, stop_ids, pages, cached)
        sequence.entered_with = sequence.stored
        sequence.published, sequence.chain, sequence.chain_broken = len(hits), hits[-1] if hits else None, False
        if self.prefix is not None:
            self.prefix_queries += self._reusable_pages(sequence)
            self.prefix_hits += len(hits)
        return RowStart(
            slot=sequence.slot,
            prompt_len=sequence.prompt_len,
            ids=sequence.ids(),
            cached=cached,
            pages=pages.astype("<i4").tobytes(),
            sampling=sequence.sampling(self._eos_token_ids),
            grammar=sequence.family.grammar,
        )

    def grow(self, slots: Slots) -> bytes:
        """One more page for each of the slots, which are distinct; the page ids, int32 LE. They must be available."""
        self._make_free(slots.size)
        columns = self.rows.page_counts(slots)
        pages = self.pool.grow(self.rows.pages[slots, columns - 1])
        self.rows.append_pages(slots, columns, pages)
        return pages.astype("<i4").tobytes()

    def _make_free(self, count: int) -> None:
        if self.prefix is not None and count > self.pool.free:
            self.prefix.evict(count - self.pool.free)

    # -------------------------- publishing

    def publish(self, sequence: Sequence, pages: int) -> None:
        """Make the sequence's first `pages` full pages findable: accepted tokens, computed in complete steps only."""
        if self.prefix is None or sequence.chain_broken or pages <= sequence.published:
            return
        first = sequence.published
        ids = sequence.page_ids(first, pages, self.page_size)
        links = sequence.links_of(first, ids)
        table = self.rows.pages[sequence.slot, first:pages].tolist()
        entries = self.prefix.publish(sequence.chain, sequence.request.salt, links, ids, table)
        if entries:
            sequence.chain = entries[-1]
            sequence.published += len(entries)
        sequence.chain_broken = len(entries) < len(ids)

    def watch(self) -> CacheWatch:
        """A reader of the prefix cache's pages and changes; one that hears nothing where prefix caching is off."""
        watch = CacheWatch(() if self.prefix is None else self.prefix.pages())
        if self.prefix is not None:
            self.prefix.watchers.append(watch)
        return watch

    def unwatch(self, watch: CacheWatch) -> None:
        """The reader is gone."""
        if self.prefix is not None:
            self.prefix.watchers.remove(watch)

    # -------------------------- giving back

    def give_back_pages(self, sequence: Sequence) -> None:
        """Retire every page behind the sequence's own fences; its row stays."""
        pages = self.rows.row_pages(sequence.slot)
        self.rows.drop_pages(sequence.slot)
        self.pool.retire(pages, self.rows.fence(sequence.slot))

    def leave(self, sequence: Sequence) -> None:
        """Retire pages and slot."""
        self.give_back_pages(sequence)
        self.rows.leave(sequence.slot)
        sequence.slot = -1
        sequence.chain = None

    def complete(self, proof: Mapping[Lane, int]) -> None:
        """The lanes are proven done up to these sequences: what was retired behind them is free or cached now."""
        self.pool.complete(proof)
        self.rows.complete(proof)


def _pages_of(hits: list[CachedPage]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([hit.page for hit in hits], np.int32)
