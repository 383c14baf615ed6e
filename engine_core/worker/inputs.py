"""The worker's tables by slot, and the batches cut from them.

Owns what persists between steps (known ids, pages, lengths) and turns a plan into the inputs of one forward. Trusts
nothing in a plan: an impossible one is a ProtocolViolation, before anything is launched from it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_core.device.base import Batch, Int32, PromptRows
from engine_core.errors import ProtocolViolation
from engine_core.step import MAX_CHUNKS, Lane, PrefillChunk, RowStart, StepPlan


def unpack_int32(data: bytes, what: str) -> Int32:
    """A little-endian int32 column; raises ProtocolViolation when it is ragged."""
    if len(data) % 4:
        raise ProtocolViolation(f"{what} holds {len(data)} bytes, no whole number of int32")
    return np.frombuffer(data, "<i4")


class RowTables:
    """Per-slot state that plans are diffs against."""

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, page_size: int, total_pages: int, vocab_size: int
    ) -> None:
        self.no_slots = np.empty(0, np.int32)
        self.page_size = page_size
        self.pages = np.zeros((max_num_seqs, -(-max_model_len // page_size)), np.int32)
        self._page_counts = np.zeros(max_num_seqs, np.int32)
        self.computed = np.zeros(max_num_seqs, np.int32)
        """Tokens whose KV is computed or launched: the next position to feed."""
        self._known: list[Int32] = [np.empty(0, np.int32)] * max_num_seqs
        self._prompt_len = np.zeros(max_num_seqs, np.int32)
        self._prompt_top = np.full(max_num_seqs, -1, np.int32)
        self._started = np.zeros(max_num_seqs, np.bool_)
        self._total_pages = total_pages
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def apply(self, plan: StepPlan) -> tuple[Int32, Int32, Int32]:
        """Take over started rows and appended pages; returns the latter as (slots, columns, pages)."""
        for start in plan.starts:
            self._start(start)
        slots = unpack_int32(plan.page_slots, "page_slots")
        pages = unpack_int32(plan.page_ids, "page_ids")
        if len(slots) != len(pages):
            raise ProtocolViolation(f"{len(slots)} page slots came with {len(pages)} pages")
        self._check_slots(slots, "page_slots")
        self._check_pages(pages)
        return slots, self._append(slots, pages), pages

    def _start(self, start: RowStart) -> None:
        slot = start.slot
        if not 0 <= slot < len(self._known):
            raise ProtocolViolation(f"a row starts in slot {slot}; there are {len(self._known)}")
        ids = unpack_int32(start.ids, "ids")
        pages = unpack_int32(start.pages, "pages")
        self._check_pages(pages)
        if not 0 < len(ids) <= self._max_model_len or not 0 < start.prompt_len <= len(ids):
            raise ProtocolViolation(f"a row starts with {len(ids)} ids, {start.prompt_len} of them prompt")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            raise ProtocolViolation("a row starts with ids outside the vocabulary")
        if not 0 <= start.cached < len(ids) or len(pages) > self.pages.shape[1]:
            raise ProtocolViolation(f"a row of {len(ids)} ids starts with {start.cached} cached, {len(pages)} pages")
        self._known[slot] = ids
        self.pages[slot, : len(pages)] = pages
        self._page_counts[slot] = len(pages)
        self.computed[slot] = start.cached
        self._prompt_len[slot] = start.prompt_len
        self._prompt_top[slot] = start.sampling.prompt_logprobs
        self._started[slot] = True

    def output(self, start: RowStart) -> Int32:
        """What a row that was just started has drawn before."""
        return self._known[start.slot][start.prompt_len :]

    def _append(self, slots: Int32, pages: Int32) -> Int32:
        """Columns that the pages went to. One page a slot is the usual case; repeated slots take theirs in order."""
        if len(slots) and len(np.unique(slots)) < len(slots):
            pairs = zip(slots, pages, strict=True)
            return np.concatenate([self._append(np.array([slot]), np.array([page])) for slot, page in pairs])
        columns = self._page_counts[slots]
        if len(columns) and int(columns.max()) >= self.pages.shape[1]:
            raise ProtocolViolation("a row got more pages than the context needs")
        self.pages[slots, columns] = pages
        self._page_counts[slots] = columns + 1
        return columns

    def decode_slots(self, plan: StepPlan) -> Int32:
        slots = unpack_int32(plan.decode_slots, "decode_slots")
        self._check_slots(slots, "decode_slots")
        return slots

    def batch(
        self, step: int, lane: Lane, decode: Int32, chunks: list[PrefillChunk], late: Sequence[int] = ()
    ) -> Batch:
        """Cut a batch and advance the rows' lengths: +1 for decode needs no result (rule S5).

        Rows in the `late` slots draw nothing behind their chunks: the last position will be computed again for that.
        """
        if len(chunks) > MAX_CHUNKS:
            raise ProtocolViolation(f"step {step} holds {len(chunks)} chunks; at most {MAX_CHUNKS} go into one")
        for chunk in chunks:
            self._check_chunk(chunk)
        chunk_slots = np.array([c.slot for c in chunks], np.int32)
        slots = np.concatenate((decode, chunk_slots))
        if len(np.unique(slots)) != len(slots):
            raise ProtocolViolation(f"step {step} names a slot twice")
        starts = self.computed[slots]
        lengths = np.ones(len(slots), np.int32)
        lengths[len(decode) :] = [c.length for c in chunks]
        ends = starts + lengths
        self._check_room(slots, ends)
        self.computed[slots] = ends
        self.computed[list(late)] -= 1
        last = np.array([c.last and c.slot not in late for c in chunks], np.bool_)
        sample_rows = np.concatenate((np.arange(len(decode)), len(decode) + np.flatnonzero(last))).astype(np.int32)
        return Batch(
            step=step,
            lane=lane,
            slots=slots,
            starts=starts,
            lengths=lengths,
            decode_rows=len(decode),
            ids=np.concatenate([self._known[c.slot][c.start : c.start + c.length] for c in chunks])
            if chunks
            else np.empty(0, np.int32),
            page_tables=self.pages,
            sample_rows=sample_rows,
            sample_positions=ends[sample_rows],
            prompt_logprobs=self._prompt_rows(chunks, len(decode)),
        )

    def _prompt_rows(self, chunks: list[PrefillChunk], first_row: int) -> list[PromptRows]:
        """What the chunks can say about the prompt tokens that follow their positions."""
        rows: list[PromptRows] = []
        for index, chunk in enumerate(chunks):
            top = int(self._prompt_top[chunk.slot])
            end = min(chunk.start + chunk.length + 1, int(self._prompt_len[chunk.slot]))
            if top >= 0 and end > chunk.start + 1:
                targets = self._known[chunk.slot][chunk.start + 1 : end]
                rows.append(PromptRows(first_row + index, chunk.slot, chunk.start, targets, top))
        return rows

    def _check_slots(self, slots: Int32, what: str) -> None:
        if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= len(self._known)):
            raise ProtocolViolation(f"{what} names a slot outside 0 .. {len(self._known) - 1}")
        if len(slots) and not self._started[slots].all():
            raise ProtocolViolation(f"{what} names a slot in which no row was started")

    def _check_pages(self, pages: Int32) -> None:
        if len(pages) and (int(pages.min()) < 0 or int(pages.max()) >= self._total_pages):
            raise ProtocolViolation(f"a page lies outside 0 .. {self._total_pages - 1}")

    def _check_chunk(self, chunk: PrefillChunk) -> None:
        if not 0 <= chunk.slot < len(self._known) or not self._started[chunk.slot]:
            raise ProtocolViolation(f"a chunk names slot {chunk.slot}, in which no row was started")
        known = len(self._known[chunk.slot])
        if chunk.length < 1 or chunk.start != self.computed[chunk.slot] or chunk.start + chunk.length > known:
            raise ProtocolViolation(
                f"a chunk covers {chunk.start} + {chunk.length} of a row with {known} ids, "
                f"{self.computed[chunk.slot]} computed"
            )
        if chunk.last != (chunk.start + chunk.length == known):
            raise ProtocolViolation("only the chunk that ends a row's known ids samples")

    def _check_room(self, slots: Int32, ends: Int32) -> None:
        if len(slots) and (
            (ends > self._page_counts[slots] * self.page_size).any() or int(ends.max()) > self._max_model_len
        ):
            raise ProtocolViolation("a row would be written beyond its pages")
