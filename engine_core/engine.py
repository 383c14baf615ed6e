"""The engine loop: commands in, one step after another, outputs out.

Owns the order of things within a step and what the end of the engine means for those who wait. Decides nothing about
scheduling and moves no bytes: `Scheduler`, `Ledger` and an `Executor` do. Every call comes from the engine thread;
none blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_core.cache.watch import CacheWatch
from engine_core.errors import Rejected, RejectReason, StatusCode, describe_chain
from engine_core.executor.base import Executor
from engine_core.ledger import Ledger
from engine_core.request import (
    FINISH_REJECTED,
    Abort,
    CloseSession,
    Command,
    Finish,
    FinishError,
    FlushCache,
    Output,
    Request,
)
from engine_core.scheduling.flight import ResultMismatch
from engine_core.scheduling.outputs import Events, OutputBuffer
from engine_core.scheduling.policy import Way
from engine_core.scheduling.scheduler import Scheduler
from engine_core.scheduling.sequence import Ended
from engine_core.step import StepResult

DRAIN_RETRY_S = 5.0
"""When a refused client may come again: by then another engine core may be up at the address."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters as in greenlane.engine.v1; sessions and uptime are the service's to add."""

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_referenced: int
    pages_retiring: int
    steps_in_flight: int
    prefills_in_flight: int
    sequences_accepted: int
    sequences_rejected: int
    sequences_started: int
    queue_wait_us: int
    finished_stop: int
    finished_length: int
    finished_abort: int
    finished_error: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int
    steps_decode: int
    steps_prefill: int
    steps_mixed: int
    steps_empty: int
    primary_busy_us: int
    prefill_busy_us: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prefill_launches: int
    prefill_completions: int
    prefills_alone: int
    prefills_mixed: int
    prefills_lane: int
    rows_discarded: int


class Engine:
    """One engine over one executor. `publish` gets at most one Output a session for each call of `step`."""

    def __init__(
        self,
        scheduler: Scheduler,
        ledger: Ledger,
        executor: Executor,
        publish: Callable[[list[Output]], None],
    ) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._executor = executor
        self._publish = publish
        self._outputs = OutputBuffer()
        self._refusal: Rejected | None = None

    # -------------------------- the loop

    def step(self, now: float) -> None:
        """Take what has come back, hand out what can run, publish. Never blocks.

        Raises EngineDead when the workers are lost or a result doesn't answer its plan. Nothing of that has been
        published then: the caller turns its health first and calls `fail_all`.
        """
        self._end(self._scheduler.expire(now))
        for result in self._executor.collect():
            self._commit(self._apply(result))
        self._scheduler.release(self._executor.caught_up())
        self._see_to_grammars()
        while (plan := self._scheduler.schedule()) is not None:
            self._executor.submit(plan)
        for started in self._scheduler.take_started():
            self._ledger.start(started, now)
            self._outputs.start(started)
        self._publish_outputs()

    def _see_to_grammars(self) -> None:
        """Take those that are prepared, ask for new ones, give back those of requests that have ended."""
        for prepared in self._executor.prepared():
            released, ended = self._scheduler.sequences.prepared(prepared)
            if released:
                first = released[0].request
                self._outputs.accept(first.session, first.number)
            self._end(ended)
        grammars = self._scheduler.sequences.grammars
        for key, grammar in grammars.take_unsent():
            self._executor.prepare(key, grammar)
        for key in grammars.take_unneeded():
            self._executor.forget(key)

    def _apply(self, result: StepResult) -> Events:
        try:
            return self._scheduler.apply(result)
        except ResultMismatch as mismatch:
            self._commit(self._scheduler.fail_owed(mismatch, describe_chain(mismatch)))
            raise

    def _commit(self, events: Events) -> None:
        self._ledger.commit(events)
        self._outputs.add(events)
        for ended in events.ended:
            self._outputs.finish(ended.session, ended.finish)

    def _end(self, ended: list[Ended]) -> None:
        self._ledger.finish(ended)
        for outcome in ended:
            self._outputs.finish(outcome.session, outcome.finish)

    def _publish_outputs(self) -> None:
        outputs = self._outputs.take()
        if outputs:
            self._publish(outputs)

    def next_wakeup(self, now: float) -> float | None:
        """When `step` has something to do even if nothing arrives: the earliest deadline, no earlier than `now`."""
        deadline = self._scheduler.next_deadline()
        return None if deadline is None else max(now, deadline)

    # -------------------------- commands

    def submit(self, command: Command, now: float) -> None:
        """Take a command over; what comes of it is published by the next `step`.

        A request that comes after its own deadline ends here, before it holds a place in the queue.
        """
        match command:
            case Request():
                self._admit(command, now)
                self._end(self._scheduler.expire(now))
            case Abort():
                self._end(self._scheduler.abort(command.session, command.numbers))
            case CloseSession():
                self._ledger.finish(self._scheduler.close_session(command.session))
                self._outputs.drop(command.session)
            case FlushCache():
                self.flush_cache()

    def _admit(self, request: Request, now: float) -> None:
        try:
            if self._refusal is not None:
                raise self._refusal
            sequences = self._scheduler.add(request)
        except Rejected as refusal:
            self._reject(request, refusal)
            return
        self._ledger.accept(sequences, now)
        if request.grammar is None:  # else it is once that is compiled
            self._outputs.accept(request.session, request.number)

    def _reject(self, request: Request, refusal: Rejected) -> None:
        """Every sequence number of the request gets its last word."""
        error = FinishError(
            refusal.reason.code, refusal.message, refusal.reason, refusal.parameter, refusal.retry_after_s
        )
        self._ledger.reject(request.params.n)
        for number in range(request.number, request.number + request.params.n):
            finish = Finish(number, FINISH_REJECTED, len(request.ids), 0, 0, error=error)
            self._outputs.finish(request.session, finish)

    def flush_cache(self) -> int:
        """Drop every prefix-cache page that no sequence refers to; the number of pages."""
        return self._scheduler.flush_cache()

    def watch_cache(self) -> CacheWatch:
        """A reader of what the prefix cache holds and of what changes there, until `unwatch_cache`."""
        return self._scheduler.residency.watch()

    def unwatch_cache(self, watch: CacheWatch) -> None:
        self._scheduler.residency.unwatch(watch)

    # -------------------------- the end

    @property
    def open_count(self) -> int:
        """Accepted sequences without a terminal outcome."""
        return self._ledger.open_count

    def drain(self) -> None:
        """Accept nothing from now on; open sequences go on."""
        if self._refusal is None:
            self._refusal = Rejected(
                RejectReason.DRAINING, "the server is draining; use another one", retry_after_s=DRAIN_RETRY_S
            )

    def abort_all(self, cause: str) -> None:
        """A last word with UNAVAILABLE for every open sequence (a drain's time is up), published at once."""
        self._end(self._scheduler.fail_open(FinishError(StatusCode.UNAVAILABLE, cause)))
        self._publish_outputs()

    def fail_all(self, cause: str) -> None:
        """The engine is over: `abort_all`, and nothing is accepted afterwards. `cause` is the whole chain."""
        self._refusal = Rejected(RejectReason.DRAINING, f"the engine has stopped: {cause}")
        self.abort_all(cause)

    def stats(self) -> EngineStats:
        """Fresh at the time of the call, whether or not a step runs."""
        scheduler, gauges, counts = self._scheduler, self._scheduler.gauges(), self._ledger.counts
        tally = scheduler.results.tally
        return EngineStats(
            running=gauges.running,
            waiting=gauges.waiting,
            pages_total=gauges.pages_total,
            pages_free=gauges.pages_free,
            pages_cached=gauges.pages_cached,
            pages_referenced=gauges.pages_referenced,
            pages_retiring=gauges.pages_retiring,
            steps_in_flight=gauges.steps_in_flight,
            prefills_in_flight=gauges.prefills_in_flight,
            sequences_accepted=counts.sequences_accepted,
            sequences_rejected=counts.sequences_rejected,
            sequences_started=counts.sequences_started,
            queue_wait_us=counts.queue_wait_us,
            finished_stop=counts.finished_stop,
            finished_length=counts.finished_length,
            finished_abort=counts.finished_abort,
            finished_error=counts.finished_error,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            output_tokens=counts.output_tokens,
            steps=scheduler.steps,
            steps_decode=tally.steps_decode,
            steps_prefill=tally.steps_prefill,
            steps_mixed=tally.steps_mixed,
            steps_empty=tally.steps_empty,
            primary_busy_us=tally.primary_busy_us,
            prefill_busy_us=tally.prefill_busy_us,
            preemptions=scheduler.sequences.preemptions,
            prefix_queries=scheduler.residency.prefix_queries,
            prefix_hits=scheduler.residency.prefix_hits,
            prefill_launches=sum(scheduler.prefill_launches.values()),
            prefills_alone=scheduler.prefill_launches[Way.ALONE],
            prefills_mixed=scheduler.prefill_launches[Way.MIXED],
            prefills_lane=scheduler.prefill_launches[Way.LANE],
            prefill_completions=scheduler.results.prefill_completions,
            rows_discarded=scheduler.results.rows_discarded,
        )
