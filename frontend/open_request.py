"""A request under way, between the edge that reads its answer and the engine core that works on it.

Owns what is measured of it (times, tokens, outcome) and that it ends exactly once, whoever ends it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Protocol

from frontend.metrics import Metrics
from frontend.request import ApiError, Code, Delta, TokenLogprob, Usage
from frontend.spans import CallSpan


class Answer(Protocol):
    """A request under way in the engine core (`generate.Generation`)."""

    prompt_logprobs: list[TokenLogprob] | None

    @property
    def started(self) -> bool:
        """Whether the engine core has begun to compute the prompt."""

    @property
    def usage(self) -> Usage: ...

    async def accepted(self) -> None:
        """Raises ApiError when the request is refused."""

    def __aiter__(self) -> AsyncIterator[list[Delta]]: ...

    async def aclose(self) -> None: ...


class OpenRequest:
    """An open request, measured on its way to the client. Iterating gives the deltas that have arrived, as lists."""

    def __init__(
        self,
        answer: Answer,
        prompt_tokens: int,
        metrics: Metrics,
        clock: Callable[[], float],
        on_given_up: Callable[[], Awaitable[None]],
        on_end: Callable[[OpenRequest], None],
        span: CallSpan | None = None,
    ) -> None:
        self._answer = answer
        self._deltas = aiter(answer)
        self._metrics = metrics
        self._clock = clock
        self._on_given_up = on_given_up
        self._on_end = on_end
        self._span = span
        self._started = self._last = clock()
        self.answering = False
        """Whether the first token is here."""
        self._outcome = "cancelled"
        self._open = True
        self.prompt_tokens = prompt_tokens

    @property
    def started(self) -> bool:
        """Whether the engine core has begun with the prompt."""
        return self._answer.started

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob]:
        """Of the whole prompt, if they were asked for; complete once the first delta is here."""
        return self._answer.prompt_logprobs or ()

    @property
    def usage(self) -> Usage:
        """Complete once the iteration has ended."""
        return self._answer.usage

    async def accepted(self) -> None:
        """Returns once the engine core has queued the request; raises ApiError if it refuses."""
        try:
            await self._answer.accepted()
        except ApiError as error:
            self._outcome = "rejected"
            if error.code is Code.UNAVAILABLE:
                await self._on_given_up()
            raise

    def __aiter__(self) -> OpenRequest:
        return self

    async def __anext__(self) -> list[Delta]:
        try:
            deltas = await anext(self._deltas)
        except ApiError as error:
            self._outcome = "failed"
            if error.code is Code.UNAVAILABLE:
                await self._on_given_up()
            raise
        self._measure(deltas)
        return deltas

    async def __aenter__(self) -> OpenRequest:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request wherever it is; the engine core stops working on it. Idempotent, from any task: a reader
        elsewhere gets CANCELLED."""
        if not self._open:
            return
        self._open = False
        try:
            await self._answer.aclose()
        finally:
            if self._outcome != "rejected":
                self._metrics.prompt_tokens += self._answer.usage.prompt_tokens
                self._metrics.cached_tokens += self._answer.usage.cached_tokens
            self._metrics.count_outcome(self._outcome)
            self._metrics.duration.observe(self._clock() - self._started)
            if self._span is not None:
                usage = self._answer.usage
                self._span.usage(usage.prompt_tokens, usage.completion_tokens, self._outcome)
            self._on_end(self)

    def _measure(self, deltas: list[Delta]) -> None:
        tokens = 0
        for delta in deltas:
            tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._outcome = delta.finish_reason
        if not tokens:
            return
        now = self._clock()
        if not self.answering:
            self.answering = True
            self._metrics.ttft.observe(now - self._started)
        else:
            self._metrics.gap.observe(now - self._last)
        self._last = now
        self._metrics.output_tokens += tokens
