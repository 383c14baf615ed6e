"""What the engine core said about one request, between the session that receives it and the generation that reads it.

Owns the hand-over: the session appends, the reader takes all there is and waits once for more, so that a token costs an
append and a step costs a wake-up. Bounded: see `session.py`. Knows no text and no protobuf.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from greenlane.engine.v1 import engine_pb2 as pb

from frontend.request import ApiError
from frontend.wire import RawLogprob


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence's regular end."""

    reason: str
    """`stop` or `length`."""
    stop_token_id: int | None
    output_tokens: int


class Sequence:
    """One of a request's n sequences: what arrived and wasn't read yet."""

    __slots__ = ("finished", "index", "logprobs", "number", "stream", "tokens", "unread_since")

    def __init__(self, stream: RequestStream, number: int, index: int) -> None:
        self.stream = stream
        self.number = number
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[RawLogprob] = []
        """Beside `tokens`, if the request asked for logprobs."""
        self.finished: Finished | None = None
        self.unread_since = 0
        """The StepOutput that brought the oldest unread news; 0: everything is read."""

    def announce(self, output: int) -> None:
        """Put the sequence before the reader, whom others wake; `output` is the StepOutput that brings news."""
        if not self.unread_since:
            self.unread_since = output
            self.stream.ready.append(self)

    def take(self) -> tuple[list[int], list[RawLogprob], Finished | None]:
        """Everything unread."""
        tokens, logprobs = self.tokens, self.logprobs
        self.tokens = []
        if logprobs:
            self.logprobs = []
        self.unread_since = 0
        return tokens, logprobs, self.finished


class RequestStream:
    """One request in the engine core, from its add to its last word. One reader.

    Its sequences hold it, and it holds only those with something unread: objects that hold each other stay until a
    garbage collection finds them, and one that many calls made necessary stops every stream.
    """

    __slots__ = (
        "_waiter",
        "accepted",
        "cached_tokens",
        "error",
        "numbers",
        "prompt_logprobs",
        "ready",
        "started",
        "unread_limit",
    )

    def __init__(self, first_number: int, count: int, unread_limit: int) -> None:
        """`unread_limit`: tokens that one sequence may have unread."""
        self.numbers = range(first_number, first_number + count)
        """Of its sequences."""
        self.unread_limit = unread_limit
        self.ready: list[Sequence] = []
        """Sequences with something unread, in order of arrival; the reader empties it."""
        self.accepted = False
        self.started = False
        """The engine core has begun with the prompt."""
        self.cached_tokens = 0
        self.prompt_logprobs: list[pb.PromptLogprobs] = []
        """Unread stretches."""
        self.error: ApiError | None = None
        """Set once; nothing follows what is unread."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def number(self) -> int:
        """The request's number: its first sequence's."""
        return self.numbers[0]

    def fail(self, error: ApiError) -> None:
        """End the request; the first error stands."""
        if self.error is None:
            self.error = error
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def changed(self) -> asyncio.Future[None]:
        """Done when there is news. Call only after finding none: what came before isn't announced again."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        return waiter
