"""Every accepted sequence that hasn't ended, and the one place where a sequence changes its state.

Owns the index by session and number, the queue, the order of those in prefill, and the rows' owners. Decides nothing:
`scheduler.py` says who runs, `results.py` what came back.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from engine_core.cache.prefix import CachedPage
from engine_core.request import FINISH_ABORT, FINISH_ERROR, FinishError, Request
from engine_core.scheduling.grammars import Grammars, grammar_error
from engine_core.scheduling.residency import Residency
from engine_core.scheduling.rows import Slots
from engine_core.scheduling.sequence import Ended, Family, Sequence, SequenceState, end_of
from engine_core.scheduling.step_model import Load
from engine_core.scheduling.waiting import WaitingQueue
from engine_core.step import GrammarPrepared, RowStart


class OpenSequences:
    """Sequences by state. `close` is how each of them ends, whatever the reason."""

    def __init__(self, residency: Residency, max_num_seqs: int, max_queue: int) -> None:
        self.residency = residency
        self.waiting = WaitingQueue(max_queue)
        self.grammars = Grammars()
        self.prefilling: list[Sequence] = []
        """Those in state PREFILL, in order."""
        self.running = 0
        """Sequences that hold a row."""
        self.parked = 0
        self.preemptions = 0
        self._owners: list[Sequence | None] = [None] * max_num_seqs
        self._by_session: dict[int, dict[int, Sequence]] = {}
        self._arrivals = 0

    # -------------------------- finding

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._by_session.values():
            yield from sequences.values()

    def find(self, session: int, number: int) -> Sequence | None:
        return self._by_session.get(session, {}).get(number)

    def of_session(self, session: int) -> list[Sequence]:
        return list(self._by_session.get(session, {}).values())

    def holder(self, slot: int) -> Sequence | None:
        """The sequence that holds a slot, if one does."""
        return self._owners[slot]

    def owner(self, slot: int) -> Sequence:
        """The sequence that holds a slot."""
        sequence = self._owners[slot]
        if sequence is None:
            raise LookupError(f"slot {slot} has no owner")
        return sequence

    def evictable(self) -> Iterator[Sequence]:
        """Sequences that hold pages: those in prefill and decode."""
        for sequence in self._owners:
            if sequence is not None and sequence.state is not SequenceState.PARKED:
                yield sequence

    def known(self, sequence: Sequence) -> int:
        """Ids known of a sequence, prompt included."""
        return int(self.residency.rows.known[sequence.slot]) if sequence.slot >= 0 else sequence.stored

    def unfinished_prompts(self) -> list[Sequence]:
        """Those in PREFILL that have something to be planned now, in order."""
        rows = self.residency.rows
        return [s for s in self.prefilling if rows.computed[s.slot] < rows.known[s.slot] and not rows.held[s.slot]]

    def load(self, decode: Slots) -> Load:
        """What a step with these decode rows would hold, and which prompts wait."""
        computed, known = self.residency.rows.computed, self.residency.rows.known
        slots = [sequence.slot for sequence in self.unfinished_prompts()]
        left = [int(known[slot] - computed[slot]) for slot in slots]
        head = self.waiting.head()
        queued = 0 if head is None else head.stored
        return Load(
            rows=decode.size,
            context=int(computed[decode].sum()),
            remaining=max(1, sum(left) + queued * len(self.waiting)),
            first=left[0] if left else max(1, queued),
            history=int(computed[slots[0]]) if slots else 0,
        )

    # -------------------------- changing state

    def add(self, request: Request) -> list[Sequence]:
        """All sequences of a request join the queue, or none does and Rejected is raised."""
        self.waiting.reserve(request.params.n, len(self._owners) - self.running)
        open_numbers = self._by_session.setdefault(request.session, {})
        numbers = range(request.number, request.number + request.params.n)
        if any(number in open_numbers for number in numbers):
            raise ValueError(f"session {request.session} already has a sequence numbered in {numbers}")
        family = Family(request.ids.astype("<i4", copy=False).tobytes())
        sequences = [Sequence(self._arrivals + 1 + i, request, i, family) for i in range(request.params.n)]
        self._arrivals += len(sequences)
        open_numbers.update(zip(numbers, sequences, strict=True))
        if request.grammar is None:
            self.waiting.push(sequences)
        else:
            family.grammar = sequences[0].serial
            self.grammars.hold(sequences, request.grammar)
            self.waiting.hold(len(sequences))
        return sequences

    def prepared(self, prepared: GrammarPrepared) -> tuple[list[Sequence], list[Ended]]:
        """The sequences that waited for this grammar and may start now, or the ends of those that can't."""
        sequences = self.grammars.settle(prepared)
        still_open = [sequence for sequence in sequences if sequence.state is not SequenceState.CLOSED]
        if prepared.error is not None:
            error = grammar_error(prepared.error)
            return [], [self.close(sequence, FINISH_ERROR, error=error) for sequence in still_open]
        self.waiting.release(still_open)
        return still_open, []

    def enter(self, sequence: Sequence, hits: list[CachedPage]) -> RowStart:
        """A sequence just taken from the queue gets its row."""
        start = self.residency.enter(sequence, hits)
        self._owners[sequence.slot] = sequence
        self.grammars.started(sequence.family.grammar)
        self.running += 1
        self._move(sequence, SequenceState.PREFILL)
        bisect.insort(self.prefilling, sequence, key=lambda other: other.order)
        return start

    def decode(self, sequence: Sequence) -> None:
        """All its known ids are scheduled (or joined): from now on it decodes."""
        self.prefilling.remove(sequence)
        self._move(sequence, SequenceState.DECODE)

    def store_stretch(self, sequence: Sequence, end: int) -> None:
        """The stretch of ids before position `end` is full, and computed: the token at `end` was drawn from it."""
        ids = self.residency.rows.stretch_before(sequence.slot, end)
        sequence.output += ids[len(ids) - 4 * (end - sequence.stored) :]
        if sequence.state is not SequenceState.PARKED:
            self.residency.publish(sequence, end // self.residency.page_size)

    def _store_rest(self, sequence: Sequence) -> None:
        """Take over all ids of a row that is about to give its pages back, and publish its full pages.

        Once a token was drawn in this row, everything before the last token is computed in complete steps.
        """
        sequence.output += self.residency.rows.unstored(sequence)
        if sequence.state is SequenceState.DECODE and sequence.stored > sequence.entered_with:
            self.residency.publish(sequence, (sequence.stored - 1) // self.residency.page_size)

    def park(self, sequence: Sequence) -> None:
        """Preempt: pages go back at once (behind their fences), the row stays until its tokens in flight are in."""
        self._store_rest(sequence)
        self.residency.give_back_pages(sequence)
        if sequence.state is SequenceState.PREFILL:
            self.prefilling.remove(sequence)
        self._move(sequence, SequenceState.PARKED)
        self.parked += 1
        self.preemptions += 1
        self.requeue_settled([sequence])

    def requeue_settled(self, sequences: list[Sequence]) -> None:
        """Parked sequences without work in flight return to the queue, with every token they have."""
        rows = self.residency.rows
        for sequence in sequences:
            if sequence.state is SequenceState.PARKED and rows.settled(sequence.slot):
                self._store_rest(sequence)
                self._leave(sequence)
                self.parked -= 1
                sequence.move(SequenceState.WAITING)
                self.waiting.push([sequence])

    def parked_sequences(self) -> list[Sequence]:
        return [s for s in self._owners if s is not None and s.state is SequenceState.PARKED]

    def close(
        self,
        sequence: Sequence,
        reason: int = FINISH_ABORT,
        stop_token_id: int | None = None,
        error: FinishError | None = None,
        *,
        quarantine: bool = False,
    ) -> Ended:
        """End a sequence. What it holds retires behind its fences; with `quarantine` it's never used again."""
        ended = end_of(sequence, reason, self.known(sequence), stop_token_id, error)
        state = sequence.state
        if state is SequenceState.DECODE and error is None:
            self._store_rest(sequence)
        sequence.move(SequenceState.CLOSED)
        self._forget(sequence)
        if sequence.family.grammar:
            self.grammars.closed(sequence.family.grammar)
        if state is SequenceState.WAITING:
            self.waiting.closed()
        elif state is SequenceState.PREFILL:
            self.prefilling.remove(sequence)
        elif state is SequenceState.PARKED:
            self.parked -= 1
        if sequence.slot >= 0 and not quarantine:
            self._leave(sequence)
        return ended

    def _forget(self, sequence: Sequence) -> None:
        numbers = self._by_session[sequence.request.session]
        del numbers[sequence.number]
        if not numbers:
            del self._by_session[sequence.request.session]

    def _leave(self, sequence: Sequence) -> None:
        self._owners[sequence.slot] = None
        self.residency.leave(sequence)
        self.running -= 1

    def _move(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.move(state)
        self.residency.rows.set_phase(sequence.slot, state)
