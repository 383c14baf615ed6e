"""An engine over a simulated worker, and what each of its sessions has seen: the tests' way to drive and to look."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_core.engine import Engine
from engine_core.ledger import Ledger
from engine_core.request import (
    FINISH_ERROR,
    FINISH_REJECTED,
    Finish,
    Grammar,
    Output,
    PromptLogprobs,
    Request,
    SamplingParams,
    prefix_chain,
)
from engine_core.scheduling.policy import FixedPolicy, PrefillPolicy
from engine_core.scheduling.scheduler import Scheduler
from engine_core.step import GrammarPrepared
from tests.engine.simulated_model import EOS, params
from tests.engine.simulated_worker import LANE_US, STEP_US, SimulatedWorker


@dataclass
class Seen:
    """One sequence as its frontend saw it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int, list[int]]] = field(default_factory=list)
    """(sampled, rank, alternatives) of each token that came with logprobs."""
    prompt: list[PromptLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    cached: int | None = None
    """Set when it was reported as started."""


class Rig:
    """Engine, worker and frontends in one thread. Time is `now`, and passes only when the test says so."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        page_size: int = 4,
        total_pages: int = 64,
        max_model_len: int = 128,
        max_queue: int = 64,
        async_depth: int = 1,
        prefix_caching: bool = True,
        overlap: bool = False,
        policy: PrefillPolicy | None = None,
    ) -> None:
        self.page_size = page_size
        self.now = 0.0
        self.worker = SimulatedWorker(
            page_size=page_size, total_pages=total_pages, max_num_seqs=max_num_seqs, overlap=overlap
        )
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            total_pages=total_pages,
            max_model_len=max_model_len,
            max_queue=max_queue,
            eos_token_ids=(EOS,),
            async_depth=async_depth,
            prefix_caching=prefix_caching,
            policy=FixedPolicy(max_num_batched_tokens, lane=overlap) if policy is None else policy,
        )
        self.ledger = Ledger()
        self.engine = Engine(self.scheduler, self.ledger, self.worker, self._publish)
        self.compiled: set[int] = set()
        self.published: list[list[Output]] = []
        self.seen: dict[tuple[int, int], Seen] = {}
        self.accepted: list[tuple[int, int]] = []
        self._next_number: dict[int, int] = {}

    # -------------------------- doing

    def request(
        self,
        prompt: list[int],
        *,
        session: int = 1,
        salt: bytes | None = None,
        priority: int = 0,
        deadline: float | None = None,
        hashes: bytes | None = None,
        sampling: SamplingParams | None = None,
        grammar: str | None = None,
        **changes: Any,
    ) -> Request:
        """A request with the session's next number; not submitted."""
        ids = np.array(prompt, np.int32)
        sampling = sampling if sampling is not None else params(**changes)
        number = self._next_number.get(session, 1)
        self._next_number[session] = number + sampling.n
        if hashes is None:
            hashes = prefix_chain(ids, self.page_size, salt)
        follows = None if grammar is None else Grammar("regex", grammar)
        return Request(session, number, ids, hashes, salt, sampling, priority, deadline, grammar=follows)

    def add(self, prompt: list[int], **options: Any) -> Request:
        """Submit a request; see `request`."""
        request = self.request(prompt, **options)
        self.engine.submit(request, self.now)
        return request

    def step(self) -> None:
        self.engine.step(self.now)
        self.check_pages()

    def compile(self, **errors: str) -> None:
        """The worker has compiled what it was asked for; `errors` by the text of the grammar."""
        for key, grammar in self.worker.asked.items():
            if key not in self.compiled:
                self.compiled.add(key)
                self.worker.grammar_outcomes.append(GrammarPrepared(key, errors.get(grammar.text)))
        self.step()

    def turn(self) -> None:
        """The worker finishes everything in flight; the engine takes it and plans on."""
        self.worker.finish_all()
        self.step()

    def run(self, turns: int = 2000) -> None:
        """Turns until nothing is open."""
        self.step()
        for _ in range(turns):
            if self.engine.open_count == 0 and not self.worker.busy:
                self.step()
                return
            self.turn()
        raise AssertionError(f"{self.engine.open_count} sequences are still open after {turns} turns")

    # -------------------------- looking

    def of(self, request: Request, index: int = 0) -> Seen:
        return self.seen.setdefault((request.session, request.number + index), Seen())

    def finish(self, request: Request, index: int = 0) -> Finish:
        finish = self.of(request, index).finish
        assert finish is not None, f"sequence {request.number + index} hasn't finished"
        return finish

    def check_pages(self) -> None:
        """Every page is in one state, and the counts say so."""
        gauges = self.scheduler.gauges()
        parts = (gauges.pages_free, gauges.pages_cached, gauges.pages_referenced, gauges.pages_retiring)
        assert min(parts) >= 0
        assert sum(parts) == gauges.pages_total

    def check_settled(self) -> None:
        """Nothing is open, held or unproven; the counters reconcile."""
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.pages_referenced, stats.pages_retiring) == (0, 0, 0, 0)
        assert stats.steps_in_flight == stats.prefills_in_flight == 0
        ended = stats.finished_stop + stats.finished_length + stats.finished_abort + stats.finished_error
        assert stats.sequences_accepted == ended
        assert stats.sequences_started <= stats.sequences_accepted
        forwards = stats.steps_decode + stats.steps_prefill + stats.steps_mixed
        assert forwards + stats.steps_empty == stats.steps
        assert stats.primary_busy_us == forwards * STEP_US
        assert stats.prefill_busy_us == stats.prefills_lane * LANE_US
        assert self.engine.open_count == 0

    def _publish(self, outputs: list[Output]) -> None:
        assert outputs, "nothing happened, and it was published"
        assert len({output.session for output in outputs}) == len(outputs)
        self.published.append(outputs)
        for output in outputs:
            self._take(output)

    def _take(self, output: Output) -> None:
        self.accepted += [(output.session, number) for number in output.accepted]
        for number, cached in output.started:
            self._sequence(output, number).cached = cached
        for stretch in output.prompt_logprobs:
            self._sequence(output, stretch.number).prompt.append(stretch)
        for number, token in zip(output.numbers.tolist(), output.tokens.tolist(), strict=True):
            self._sequence(output, number).tokens.append(token)
        self._take_logprobs(output)
        for finish in output.finishes:
            seen = self._sequence(output, finish.number)
            seen.finish = finish
            if finish.reason not in (FINISH_REJECTED, FINISH_ERROR):
                assert finish.output_tokens == len(seen.tokens)

    def _take_logprobs(self, output: Output) -> None:
        if (columns := output.logprobs) is None:
            return
        ends = np.cumsum(columns.counts).tolist()
        for i, row in enumerate(columns.rows.tolist()):
            tops = columns.top_ids[ends[i] - int(columns.counts[i]) : ends[i]].tolist()
            entry = (float(columns.sampled[i]), int(columns.ranks[i]), tops)
            self._sequence(output, int(output.numbers[row])).logprobs.append(entry)

    def _sequence(self, output: Output, number: int) -> Seen:
        seen = self.seen.setdefault((output.session, number), Seen())
        assert seen.finish is None, f"sequence {number} was published after its last word"
        return seen
