"""Decides what each step computes: data in, plan out. It never acts: no clock, no I/O, no worker.

Owns the policy. Decode rows come first, one token each; what the token budget leaves goes to prompts in chunks, in
order of (priority, arrival), with waiting sequences admitted on the way. Pages are taken when they are needed; when
they run short, the running sequence last in that order is preempted for one before it and recomputed later
(`decoding.py`), so the first in order always gets on, and with it everybody. Up to `async_depth` plans are in flight:
lengths advance here, without a result; only ends by a stop id are found late, and their extra rows are discarded.

How many prompt tokens a plan with decode rows holds, and whether they share its forward or go out as a batch for the
prefill lane, is the policy's choice (`policy.py`); a plan without decode rows computes its chunks on the primary lane,
with the whole GPU. While a batch is on the prefill lane no plan holds chunks (rule L6): so a sequence's chunks are on
one lane at a time, and no slot is started anew under a batch that hasn't joined.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.errors import Rejected, RejectReason, StatusCode
from engine_core.request import FINISH_ABORT, FINISH_ERROR, FinishError, Request
from engine_core.scheduling.deadlines import Deadlines
from engine_core.scheduling.decoding import DecodePlanner
from engine_core.scheduling.flight import Chunk, Flight, InFlight, PrefillBatch, ResultMismatch
from engine_core.scheduling.open_sequences import OpenSequences
from engine_core.scheduling.outputs import Events, Started
from engine_core.scheduling.policy import Choice, PrefillPolicy, Way
from engine_core.scheduling.residency import Residency
from engine_core.scheduling.results import Results
from engine_core.scheduling.rows import RowGroup, Slots
from engine_core.scheduling.sequence import Ended, Sequence, SequenceState
from engine_core.scheduling.step_model import Load
from engine_core.step import MAX_CHUNKS, Lane, PrefillChunk, RowStart, StepPlan, StepResult

ADMITTED_TOKENS_PER_STEP = 16384
"""Known ids of the sequences that one step admits, so that the host work of long prompts (cached ones cost no budget)
doesn't stretch the other rows' step. One sequence of any length may always enter."""
OBSERVED_EVERY = 8
"""Of so many steps of decode rows with nothing beside them, the policy sees one."""
NO_PREFILL = Choice(0, Way.ALONE)


@dataclass(frozen=True, slots=True)
class Gauges:
    """Sequences, pages and steps right now; see greenlane.engine.v1.Gauges."""

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_referenced: int
    pages_retiring: int
    steps_in_flight: int
    prefills_in_flight: int


class Scheduler:
    """Every sequence from admission to its end. All calls come from one thread."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        page_size: int,
        total_pages: int,
        max_model_len: int,
        max_queue: int,
        eos_token_ids: tuple[int, ...],
        async_depth: int,
        prefix_caching: bool,
        policy: PrefillPolicy,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError("every running sequence may decode one token a step: the token budget must cover them")
        self.steps = 0
        self.prefill_launches = dict.fromkeys(Way, 0)
        """Plans with chunks, by how they were computed."""
        self.residency = Residency(
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            total_pages=total_pages,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            prefix_caching=prefix_caching,
        )
        self.sequences = OpenSequences(self.residency, max_num_seqs, max_queue)
        self.in_flight = InFlight()
        self.results = Results(self.sequences, self.in_flight)
        self._deadlines = Deadlines()
        self._rows = self.residency.rows
        self._pool = self.residency.pool
        self._policy = policy
        self._async_depth = async_depth
        self._started: list[Started] = []
        self._decoding = DecodePlanner(self.residency, self.sequences)

    # -------------------------- what comes in

    def add(self, request: Request) -> list[Sequence]:
        """Queue all sequences of a validated request, or none and raise Rejected."""
        needed, total = self.residency.pages_for(len(request.ids) + request.params.max_tokens), self._pool.total
        if needed > total:
            raise Rejected(
                RejectReason.NEVER_FITS,
                f"prompt ({len(request.ids)} tokens) + max_tokens ({request.params.max_tokens}) need {needed} pages of "
                f"{self.residency.page_size} tokens; the KV cache has {total}: lower max_tokens or give the server "
                "more memory (--kv-cache-memory)",
                "max_tokens",
            )
        sequences = self.sequences.add(request)
        for sequence in sequences:
            self._deadlines.add(sequence, len(self.sequences.waiting) + self.sequences.running)
        return sequences

    def abort(self, session: int, numbers: tuple[int, ...]) -> list[Ended]:
        """End these sequences; unknown, finished and repeated numbers are ignored. They are in no later plan."""
        found = [self.sequences.find(session, number) for number in dict.fromkeys(numbers)]
        return [self.sequences.close(sequence, FINISH_ABORT) for sequence in found if sequence is not None]

    def close_session(self, session: int) -> list[Ended]:
        """End all that a session has open."""
        return [self.sequences.close(sequence, FINISH_ABORT) for sequence in self.sequences.of_session(session)]

    def expire(self, now: float) -> list[Ended]:
        """End the sequences whose deadline has come."""
        return [
            self.sequences.close(
                sequence,
                FINISH_ERROR,
                error=FinishError(StatusCode.DEADLINE_EXCEEDED, "the request's deadline has passed"),
            )
            for sequence in self._deadlines.due(now)
        ]

    def fail_open(self, error: FinishError) -> list[Ended]:
        """End every open sequence with the same error."""
        return [self.sequences.close(sequence, FINISH_ERROR, error=error) for sequence in list(self.sequences)]

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def flush_cache(self) -> int:
        """Drop every prefix-cache page that no sequence refers to; the number of pages."""
        return self.residency.prefix.flush() if self.residency.prefix is not None else 0

    def apply(self, result: StepResult) -> Events:
        """What a step's result brings about. Raises ResultMismatch, having applied nothing."""
        observed = self.in_flight.observed(result)
        events = self.results.apply(result)
        for work in observed:
            self._policy.observe(work)
        return events

    def release(self, slots: list[int]) -> None:
        """Late rows in these slots may be planned again."""
        self._rows.release(slots)

    def fail_owed(self, mismatch: ResultMismatch, cause: str) -> Events:
        """End the sequences of a lost result; nothing they hold is used again."""
        return self.results.fail_owed(mismatch, cause)

    def take_started(self) -> list[Started]:
        """Sequences whose first chunk was planned since the last call."""
        started, self._started = self._started, []
        return started

    def gauges(self) -> Gauges:
        return Gauges(
            running=self.sequences.running,
            waiting=len(self.sequences.waiting),
            pages_total=self._pool.total,
            pages_free=self._pool.free,
            pages_cached=self._pool.cached,
            pages_referenced=self._pool.referenced,
            pages_retiring=self._pool.retiring,
            steps_in_flight=len(self.in_flight),
            prefills_in_flight=int(self.in_flight.batch is not None),
        )

    # -------------------------- what goes out

    def schedule(self) -> StepPlan | None:
        """The next step, or None: enough is in flight, or there is nothing to do.

        When a prefill batch is all that's in flight, the plan is an empty one, which the worker answers when the batch
        is complete: so its result comes out without other work arriving, and nobody polls.
        """
        if self.in_flight.working >= self._async_depth:
            return None
        decode, grown, page_ids = self._decoding.plan()
        load, choice = self._choose(decode)
        starts, chunks = self._plan_prefill(choice.tokens)
        if decode.slots.size == 0 and not chunks and (self.in_flight.batch is None or len(self.in_flight)):
            return None
        return self._submit(decode, grown, page_ids, starts, chunks, choice if chunks else None, load)

    def _choose(self, decode: RowGroup) -> tuple[Load | None, Choice]:
        """What the policy says to this load: no prompt token while a batch is on the prefill lane (rule L6).

        The load is None where it needn't be known: for most steps of decode rows alone.
        """
        prefilling = self.in_flight.batch is None and bool(
            len(self.sequences.waiting) or self.sequences.unfinished_prompts()
        )
        if not prefilling and self.in_flight.batch is None and self.steps % OBSERVED_EVERY:
            return None, NO_PREFILL
        load = self.sequences.load(decode.slots)
        return load, self._policy.choose(load) if prefilling else NO_PREFILL

    def _submit(
        self,
        decode: RowGroup,
        grown: Slots,
        page_ids: bytes,
        starts: list[RowStart],
        chunks: list[Chunk],
        choice: Choice | None,
        load: Load | None,
    ) -> StepPlan:
        """Book a plan as in flight: lengths advance and fences move now, no result is waited for."""
        self.steps += 1
        on_lane = choice is not None and choice.way is Way.LANE
        partition = choice.partition if choice is not None else 0
        self._book_decode(decode.slots)
        self._book_chunks(chunks, on_lane=on_lane)
        if choice is not None:
            self.prefill_launches[choice.way] += 1
        self.in_flight.submit(
            Flight(
                step=self.steps,
                rows=decode,
                chunks=[] if on_lane else chunks,
                batch=PrefillBatch(self.steps, chunks, partition) if on_lane else None,
                load=load,
            )
        )
        return StepPlan(
            step=self.steps,
            starts=starts,
            page_slots=grown.astype("<i4").tobytes() if grown.size else b"",
            page_ids=page_ids,
            decode_slots=decode.packed_slots,
            chunks=[PrefillChunk(chunk.slot, chunk.start, chunk.length, chunk.last) for chunk in chunks],
            prefill_lane=on_lane,
            partition=partition,
        )

    def _book_decode(self, slots: Slots) -> None:
        self._rows.computed[slots] += 1
        self._rows.fences[Lane.PRIMARY][slots] = self.steps

    def _book_chunks(self, chunks: list[Chunk], *, on_lane: bool) -> None:
        """A row on the prefill lane decodes after its join, and one that follows a grammar when it has drawn.

        Any other can be in the next plan.
        """
        for chunk in chunks:
            self._rows.computed[chunk.slot] = chunk.end
            self._rows.fences[Lane.PRIMARY][chunk.slot] = self.steps
            if on_lane:
                self._rows.fences[Lane.PREFILL][chunk.slot] = self.steps
            elif chunk.last and not self._rows.constrained[chunk.slot]:
                self.sequences.decode(chunk.sequence)

    # -------------------------- prefill and admission

    def _plan_prefill(self, budget: int) -> tuple[list[RowStart], list[Chunk]]:
        """Chunks in order of (priority, arrival), from running prefills and, as long as it fits, from the queue."""
        starts: list[RowStart] = []
        chunks: list[Chunk] = []
        if not budget:
            return starts, chunks
        deferred: list[Sequence] = []
        running = self.sequences.unfinished_prompts()
        admitted_tokens, admit = 0, True
        while budget > 0 and len(chunks) < MAX_CHUNKS:
            head = self._next_waiting(deferred) if admit else None
            if running and (head is None or running[0].order < head.order):
                sequence = running.pop(0)
            elif head is None:
                break
            else:
                start = self._admit(head, admitted_tokens)
                if start is None:
                    admit = False
                    continue
                starts.append(start)
                admitted_tokens += head.stored
                sequence = head
            chunks.append(self._cut(sequence, budget))
            budget -= chunks[-1].length
        self.sequences.waiting.push(deferred)
        return starts, chunks

    def _cut(self, sequence: Sequence, budget: int) -> Chunk:
        start, known = int(self._rows.computed[sequence.slot]), int(self._rows.known[sequence.slot])
        length = min(budget, known - start)
        return Chunk(sequence, sequence.slot, start, length, start + length == known)

    def _next_waiting(self, deferred: list[Sequence]) -> Sequence | None:
        """The first in the queue that may start; siblings that wait for their prompt's pages are set aside."""
        waiting = self.sequences.waiting
        while (head := waiting.head()) is not None and self._waits_for_sibling(head):
            deferred.append(waiting.pop())
        return head

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Whether a sibling is computing the prompt right now, whose pages this sequence will find afterwards."""
        leader = sequence.family.leader
        return (
            leader is not None
            and leader.state in (SequenceState.PREFILL, SequenceState.DECODE)
            and not sequence.family.computed
            and not sequence.started
            and sequence.params.prompt_logprobs < 0
            and self.residency.prefix is not None
            and sequence.prompt_len > self.residency.page_size
        )

    def _admit(self, sequence: Sequence, admitted_tokens: int) -> RowStart | None:
        """Start the head of the queue, or None while a slot or pages are missing, or this step has admitted enough.

        Every running row must be able to grow by a page beside it, or the newcomer would soon be preempted.
        """
        if self._rows.free_slots == 0:
            return None
        if admitted_tokens and admitted_tokens + sequence.stored > ADMITTED_TOKENS_PER_STEP:
            return None
        hits = self.residency.lookup(sequence)
        if self.residency.missing(sequence, hits) + self.sequences.running > 0:
            return None
        self.sequences.waiting.pop()
        start = self.sequences.enter(sequence, hits)
        if not sequence.family.computed:
            sequence.family.leader = sequence
        if not sequence.started:
            sequence.started = True
            sequence.cached_tokens = start.cached
            request = sequence.request
            self._started.append(
                Started(request.session, sequence.number, sequence.prompt_len, start.cached, sequence.queued_at)
            )
        return start
