"""Applies a step's result: tokens to rows, full pages to the prefix cache, ends to sequences.

Owns what may be believed when: a token counts when its sequence is still open, a page becomes visible when the step
that filled it is complete (OWNERSHIP rule O8). Plans nothing.
"""

from __future__ import annotations

import numpy as np

from engine_core.errors import StatusCode
from engine_core.request import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    FinishError,
    Ids,
    LogprobColumns,
    PromptLogprobs,
)
from engine_core.scheduling.flight import BatchState, Chunk, Flight, InFlight, ResultMismatch
from engine_core.scheduling.grammars import grammar_error
from engine_core.scheduling.open_sequences import OpenSequences
from engine_core.scheduling.outputs import Events, TokenColumns, read_logprobs, select_logprobs
from engine_core.scheduling.rows import RowGroup, Slots
from engine_core.scheduling.sequence import Sequence, SequenceState
from engine_core.scheduling.tally import Tally
from engine_core.step import Lane, PrefillResult, PromptLogprobBlock, StepResult

CLOSED, PARKED, PREFILL = SequenceState.CLOSED, SequenceState.PARKED, SequenceState.PREFILL


class Results:
    """Turns results into events, in step order."""

    def __init__(self, sequences: OpenSequences, in_flight: InFlight) -> None:
        self.prefill_completions = 0
        self.rows_discarded = 0
        self.tally = Tally()
        self._sequences = sequences
        self._in_flight = in_flight
        self._residency = sequences.residency
        self._rows = sequences.residency.rows

    def apply(self, result: StepResult) -> Events:
        """Everything a result says, prefill ownership first (rule O7), fences last. Raises ResultMismatch.

        First tokens come ahead of further ones, and so out to their clients: those have waited longest.
        """
        flight = self._in_flight.land(result)
        events = Events(result.step)
        if flight.batch is not None:
            flight.batch.advance(BatchState.CORE_OWNED)
        for slot, cause in result.refused:
            self._refuse(slot, cause, events)
        for prefill in result.prefills:
            self._apply_prefill(flight, prefill, events)
        if result.error is not None:
            self._fail(self.sequences_of(flight), result.error, events)
        else:
            self._apply_decode(flight, result, events)
        self.tally.add(flight, result)
        self._rows.applied[Lane.PRIMARY] = result.step
        self._residency.complete(_proof(flight, result))
        if self._sequences.parked:
            self._sequences.requeue_settled(self._sequences.parked_sequences())
        return events

    def fail_owed(self, mismatch: ResultMismatch, cause: str) -> Events:
        """End the sequences whose result is lost with INTERNAL; their pages and slots are never used again."""
        owed = self.sequences_of(mismatch.flight) if mismatch.flight is not None else []
        if mismatch.batch is not None:
            owed += [chunk.sequence for chunk in mismatch.batch.chunks]
        events = Events(mismatch.flight.step if mismatch.flight is not None else 0)
        self._fail(owed, cause, events, quarantine=True)
        return events

    def sequences_of(self, flight: Flight) -> list[Sequence]:
        """The sequences of a plan's decode rows and chunks, as far as they are open."""
        gone = self._rows.departed(flight.rows)
        slots = flight.rows.slots if gone is None else flight.rows.slots[~gone]
        decoding = [self._sequences.owner(slot) for slot in slots.tolist()]
        return decoding + [chunk.sequence for chunk in flight.chunks]

    def _fail(self, sequences: list[Sequence], cause: str, events: Events, *, quarantine: bool = False) -> None:
        error = FinishError(StatusCode.INTERNAL, cause)
        for sequence in sequences:
            if sequence.state is not CLOSED:
                ended = self._sequences.close(sequence, FINISH_ERROR, error=error, quarantine=quarantine)
                events.ended.append(ended)

    def _refuse(self, slot: int, cause: str, events: Events) -> None:
        """A row whose grammar allows nothing any more. The slot is still its own, if it is open: this is its fence."""
        sequence = self._sequences.holder(slot)
        if sequence is not None:
            events.ended.append(self._sequences.close(sequence, FINISH_ERROR, error=grammar_error(cause)))

    # -------------------------- decode rows

    def _apply_decode(self, flight: Flight, result: StepResult, events: Events) -> None:
        group = flight.rows
        if group.slots.size == 0:
            return
        tokens = np.frombuffer(result.tokens, "<i4")
        logprobs = read_logprobs(result.logprobs)
        gone = self._rows.departed(group)
        if gone is not None or result.late:
            stays = np.ones(group.slots.size, np.bool_) if gone is None else ~gone
            late = np.isin(group.slots, result.late)
            self._hold(group.slots[late & stays])
            kept = np.flatnonzero(stays[~late])
            self.rows_discarded += tokens.size - kept.size
            logprobs = select_logprobs(logprobs, kept, tokens.size)
            group, tokens = self._rows.group(group.slots[~late & stays]), tokens[kept]
        self._append(group, tokens, logprobs, events)

    def _hold(self, late: Slots) -> None:
        """Open rows that were left out of their step."""
        for slot in late.tolist():
            self._rows.hold(slot)

    def _append(self, group: RowGroup, tokens: Ids, logprobs: LogprobColumns | None, events: Events) -> None:
        """One accepted token for each row of a group: ids, and what the few special ones among them bring about."""
        rows = self._rows
        positions = rows.append_ids(group, tokens)
        events.tokens.append(TokenColumns(group.sessions, tokens, logprobs))
        due = positions >= rows.due[group.slots]
        stopped = rows.stops(group, tokens, positions)
        special = due if stopped is None else due | stopped
        for at in special.nonzero()[0].tolist():
            sequence, position = self._sequences.owner(group.slots.item(at)), positions.item(at)
            if due[at]:
                self._see_to(sequence, position)
            if stopped is not None and stopped[at]:
                events.ended.append(self._sequences.close(sequence, FINISH_STOP, stop_token_id=tokens.item(at)))
            elif position + 1 >= sequence.limit:
                events.ended.append(self._sequences.close(sequence, FINISH_LENGTH))

    def _see_to(self, sequence: Sequence, position: int) -> None:
        """A token stands at a position that was waited for: one behind a full stretch, or the last one."""
        if position % self._rows.stretch == 0:
            self._sequences.store_stretch(sequence, position)
        self._rows.call_again(sequence.slot, position)

    # -------------------------- chunks

    def _apply_prefill(self, flight: Flight, prefill: PrefillResult, events: Events) -> None:
        """Chunks that shared the step's forward, or the batch of the prefill lane joining now."""
        self.prefill_completions += 1
        batch = self._in_flight.batch
        if flight.chunks or batch is None:
            self._apply_chunks(flight.chunks, prefill, events)
            return
        batch.advance(BatchState.COMPLETE)
        self._apply_chunks(batch.chunks, prefill, events)
        batch.advance(BatchState.APPLIED)
        self._rows.applied[Lane.PREFILL] = batch.step
        self._in_flight.batch = None

    def _apply_chunks(self, chunks: list[Chunk], prefill: PrefillResult, events: Events) -> None:
        if prefill.error is not None:
            self._fail([chunk.sequence for chunk in chunks], prefill.error, events)
            return
        for block in prefill.prompt_logprobs:
            self._describe_prompt(chunks, block, events)
        for chunk in chunks:
            if chunk.sequence.state is not CLOSED:
                self._complete_chunk(chunk, late=chunk.slot in prefill.late)
        lasts = [chunk for chunk in chunks if chunk.last and chunk.slot not in prefill.late]
        self._apply_first_tokens(lasts, prefill, events)

    def _complete_chunk(self, chunk: Chunk, *, late: bool) -> None:
        """The chunk's KV is proven written: its full pages become visible (rule O8).

        The last position of a late row's is written again, so it isn't done.
        """
        sequence, page_size = chunk.sequence, self._rows.page_size
        done = chunk.end - late
        if late:
            self._rows.hold(chunk.slot)
        if sequence.state is not PARKED:
            self._residency.publish(sequence, done // page_size)
        if done // page_size >= (sequence.prompt_len - 1) // page_size:
            sequence.family.computed = True
        if chunk.last and not late and sequence.state is PREFILL:
            self._sequences.decode(sequence)

    def _apply_first_tokens(self, lasts: list[Chunk], prefill: PrefillResult, events: Events) -> None:
        if not lasts:
            return
        tokens = np.frombuffer(prefill.tokens, "<i4")
        logprobs = read_logprobs(prefill.logprobs)
        kept = np.array([i for i, c in enumerate(lasts) if c.sequence.state is not CLOSED], np.int64)
        if kept.size < len(lasts):
            self.rows_discarded += len(lasts) - kept.size
            logprobs = select_logprobs(logprobs, kept, len(lasts))
        slots = np.array([lasts[i].slot for i in kept.tolist()], np.int64)
        if slots.size:
            self._append(self._rows.group(slots), tokens[kept], logprobs, events)

    def _describe_prompt(self, chunks: list[Chunk], block: PromptLogprobBlock, events: Events) -> None:
        """Publish a stretch of prompt logprobs, without what was published before a preemption."""
        sequence = next(chunk.sequence for chunk in chunks if chunk.slot == block.slot)
        count = len(block.logprobs) // 4
        known = sequence.described - block.start
        if sequence.state is CLOSED or known >= count:
            return
        stretch = PromptLogprobs(
            number=sequence.number,
            start=block.start + known,
            logprobs=block.logprobs[4 * known :],
            ranks=block.ranks[4 * known :],
            top=block.top,
            top_ids=block.top_ids[4 * known * block.top :],
            top_logprobs=block.top_logprobs[4 * known * block.top :],
        )
        sequence.described = block.start + count
        events.prompt_logprobs.append((sequence.request.session, stretch))


def _proof(flight: Flight, result: StepResult) -> dict[Lane, int]:
    """What the result proves of each lane; a reported batch of the prefill lane is proven by its report."""
    batches = [] if flight.chunks else [prefill.step for prefill in result.prefills]
    return {Lane.PRIMARY: result.primary_complete, Lane.PREFILL: max([result.prefill_complete, *batches])}
