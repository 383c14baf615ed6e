"""Random lives of an engine: arrivals, aborts, priorities, preemption, faults, lanes; whatever happens, same tokens.

The simulated worker reads KV through the page tables it was given and checks every plan, so a page that is shared or
reused too early (rules O8, O11, O12), two prefill batches at once (L6), a wrong length or a cross-hit turn this red.
"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.errors import StatusCode
from engine_core.request import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_REJECTED,
    FINISH_STOP,
    Abort,
    CloseSession,
    FlushCache,
    Request,
    prefix_chain,
)
from tests.engine.rig import Rig, Seen
from tests.engine.simulated_model import expected_tokens
from tests.engine.simulated_worker import prompt_logprob

MAX_MODEL_LEN = 40
BASES = [[1 + (7 * i + 3 * base) % 40 for i in range(24)] for base in range(3)]
"""Prompts share beginnings, as conversations do."""


class EngineLife(RuleBasedStateMachine):
    """One engine. Time of the worker's lanes passes only by rules."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.closed_sessions: set[int] = set()
        self.next_session = 3

    @initialize(
        depth=st.integers(1, 3),
        overlap=st.booleans(),
        prefix_caching=st.booleans(),
        page_size=st.sampled_from([1, 2, 4]),
        pages=st.integers(8, 30),
        seqs=st.integers(1, 5),
        budget=st.sampled_from([5, 8, 64]),
    )
    def build(
        self, depth: int, overlap: bool, prefix_caching: bool, page_size: int, pages: int, seqs: int, budget: int
    ) -> None:
        self.rig = Rig(
            async_depth=depth,
            overlap=overlap,
            prefix_caching=prefix_caching,
            page_size=page_size,
            total_pages=pages,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_queue=12,
        )

    @rule(
        base=st.integers(0, 2),
        length=st.integers(1, 16),
        tail=st.lists(st.integers(1, 40), max_size=2),
        max_tokens=st.integers(1, 16),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        ignore_eos=st.booleans(),
        stops=st.sets(st.integers(0, 47), max_size=6),
        min_tokens=st.integers(0, 3),
        logprobs=st.sampled_from([-1, -1, 0, 2]),
        prompt_logprobs=st.sampled_from([-1, -1, -1, 1]),
        salt=st.sampled_from([None, None, b"", b"a"]),
        session=st.integers(1, 2),
        lifetime=st.sampled_from([None, None, None, 3.0]),
        lie=st.booleans(),
    )
    def add(
        self,
        base: int,
        length: int,
        tail: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        ignore_eos: bool,
        stops: set[int],
        min_tokens: int,
        logprobs: int,
        prompt_logprobs: int,
        salt: bytes | None,
        session: int,
        lifetime: float | None,
        lie: bool,
    ) -> None:
        prompt = BASES[base][:length] + tail
        lies = prefix_chain(np.array(BASES[0][: len(prompt)], np.int32), self.rig.page_size, None)
        request = self.rig.add(
            prompt,
            session=session if session not in self.closed_sessions else self.next_session,
            salt=salt,
            priority=priority,
            deadline=None if lifetime is None else self.rig.now + lifetime,
            hashes=lies if lie and len(lies) == 32 * (len(prompt) // self.rig.page_size) else None,
            max_tokens=max_tokens,
            n=n,
            ignore_eos=ignore_eos,
            stop_token_ids=frozenset(stops),
            min_tokens=min(min_tokens, max_tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            seed=len(self.requests),
        )
        self.requests.append(request)

    @rule()
    def step(self) -> None:
        self.rig.step()

    @rule()
    def finish_step(self) -> None:
        self.rig.worker.finish_step()

    @rule()
    def finish_prefill(self) -> None:
        self.rig.worker.finish_prefill()

    @rule()
    def turn(self) -> None:
        self.rig.turn()

    @rule(pick=st.integers(0, 1 << 16), index=st.integers(0, 2))
    @precondition(lambda self: self.requests)
    def abort(self, pick: int, index: int) -> None:
        """Any sequence, finished ones and siblings' numbers beyond the request included."""
        request = self.requests[pick % len(self.requests)]
        self.rig.engine.submit(Abort(request.session, (request.number + index,)), self.rig.now)

    @rule(session=st.integers(1, 2))
    def close_session(self, session: int) -> None:
        if session not in self.closed_sessions:
            self.closed_sessions.add(session)
            self.rig.engine.submit(CloseSession(session), self.rig.now)

    @rule()
    def flush(self) -> None:
        self.rig.engine.submit(FlushCache(), self.rig.now)

    @rule()
    def pass_time(self) -> None:
        self.rig.now += 1.0

    @rule()
    def fail_a_step(self) -> None:
        self.rig.worker.fail_steps[len(self.rig.worker.plans) + 1] = "RuntimeError: out of luck"

    @rule()
    def fail_a_prefill(self) -> None:
        self.rig.worker.fail_prefills[len(self.rig.worker.plans) + 1] = "RuntimeError: out of luck"

    @invariant()
    def tokens_are_those_of_an_uncontended_run(self) -> None:
        for request in self.requests:
            for index in range(request.params.n):
                seen = self.rig.of(request, index)
                if seen.tokens:
                    assert seen.tokens == expected_tokens(request, index)[: len(seen.tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.worker.fail_steps.clear()
        self.rig.worker.fail_prefills.clear()
        self.rig.run()
        self.rig.check_settled()
        for request in self.requests:
            if request.session not in self.closed_sessions:
                for index in range(request.params.n):
                    check_end(request, index, self.rig.of(request, index))


def check_end(request: Request, index: int, seen: Seen) -> None:
    """The last word is the one that this request deserves, and everything before it is complete."""
    assert seen.finish is not None
    if seen.finish.reason == FINISH_REJECTED:
        assert seen.tokens == []
        return
    if seen.finish.reason == FINISH_ERROR:
        assert seen.finish.error is not None
        assert seen.finish.error.code in (StatusCode.INTERNAL, StatusCode.DEADLINE_EXCEEDED)
    elif seen.finish.reason != FINISH_ABORT:
        expected = expected_tokens(request, index)
        stopped = seen.finish.reason == FINISH_STOP
        assert seen.tokens == expected
        assert stopped or seen.finish.reason == FINISH_LENGTH
        assert seen.finish.stop_token_id == (expected[-1] if stopped else None)
        assert stopped or len(expected) == request.params.max_tokens
    check_logprobs(request, seen)


def check_logprobs(request: Request, seen: Seen) -> None:
    count = request.params.logprobs
    tops = [[token + k for k in range(max(0, count))] for token in seen.tokens]
    expected = [(-float(token), token + 1, top) for token, top in zip(seen.tokens, tops, strict=True)]
    assert seen.logprobs == (expected if count >= 0 else [])
    values = [value for stretch in seen.prompt for value in np.frombuffer(stretch.logprobs, "<f4").tolist()]
    prompt = [int(token) for token in request.ids]
    described = (
        [prompt_logprob(prompt, i) for i in range(1, len(prompt))] if request.params.prompt_logprobs >= 0 else []
    )
    assert values == described[: len(values)]
    starts = [stretch.start for stretch in seen.prompt]
    assert starts == [1 + sum(len(s.ranks) // 4 for s in seen.prompt[:i]) for i in range(len(starts))]
    assert not seen.tokens or values == described


TestEngineLife = EngineLife.TestCase
TestEngineLife.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
