"""One text request from ids to text deltas: the engine core's tokens, detokenized, cut at stop strings.

Owns what a sequence's text is and how it ends; tells the engine core when a stop string ended it or the reader went
away. Speaks no edge's format and validates no sampling value but the stop strings.

What ends a sequence, and what its text holds then:
  * A stop string, wherever tokens break: text up to it (with `include_stop`, through it), finish reason `stop`. Text of
    the first `min_tokens` tokens isn't searched. The token that completed it is the sequence's last.
  * An eos or stop id: it is in `token_ids`; its text is left out, unless it is an ordinary token and `include_stop`.
  * `max_tokens` or a full context: everything, bytes that never became a character as U+FFFD.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from greenlane.engine.v1 import engine_pb2 as pb

from frontend.request import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    ApiError,
    Code,
    Delta,
    TextRequest,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from frontend.stop_strings import StopMatch, StopStrings
from frontend.streams import Finished, RequestStream, Sequence
from frontend.tokenizer import Tokenizer
from frontend.wire import ProtocolViolation, RawLogprob, prompt_rows

INLINE_LOGPROBS = 2048
"""Prompt logprobs, alternatives counted, that are converted on the event loop (some ms); more in a worker thread."""


class Requests(Protocol):
    """The way into an engine core (`engine_client.EngineClient`, `engine_group.EngineGroup`)."""

    async def submit(self, request: TextRequest) -> RequestStream: ...

    def abort(self, stream: RequestStream) -> None: ...

    def abort_sequence(self, sequence: Sequence) -> None: ...


def generate(client: Requests, tokenizer: Tokenizer, request: TextRequest) -> Generation:
    """The answer to a request; nothing is sent before `accepted()` or the iteration.

    Raises ApiError (INVALID_ARGUMENT) for stop strings that can't be served.
    """
    return Generation(client, tokenizer, request)


class Generation:
    """An answer as it comes. One reader: `accepted()` if wanted, then one iteration.

    Whoever may leave the iteration before its end uses `async with` or calls `aclose()`; cancellation and errors inside
    it end the request by themselves. Iteration yields everything new at once, the sequences of a request interleaved:
    a Delta a token where logprobs, a stop string or an end belong to one, else a Delta for all that a sequence had
    unread, so that a reader that falls behind catches up. It raises ApiError when the request fails, after what came
    before was yielded.
    """

    def __init__(self, client: Requests, tokenizer: Tokenizer, request: TextRequest) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._request = request
        self._stops = _stop_strings(request.stop)
        self._stream: RequestStream | None = None
        self._texts: list[SequenceText] = []
        self._unfinished = request.sampling.n or 1
        self._closed = False
        self._wants_prompt = request.sampling.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprob] | None = None
        """One per prompt token, if asked for; complete when the first delta is there."""

    async def accepted(self) -> None:
        """Send the request and wait until the engine core has queued it. Raises ApiError if it is refused."""
        try:
            if self._stream is None:
                self._stream = await self._client.submit(self._request)
                self._texts = [self._new_text() for _ in self._stream.numbers]
                if self._closed:  # by somebody else, while a long prompt was on its way
                    self._abort()
            stream = self._stream
            while not (stream.accepted or stream.ready or stream.error):
                await stream.changed()
        except BaseException:
            self._abort()
            raise
        if stream.error is not None and not stream.ready:
            raise self._named(stream.error)

    @property
    def started(self) -> bool:
        """Whether the engine core has begun to compute the prompt."""
        return self._stream is not None and self._stream.started

    @property
    def usage(self) -> Usage:
        """Of what was read so far; final at the end of the iteration."""
        cached = 0 if self._stream is None else self._stream.cached_tokens
        return Usage(len(self._request.prompt_ids), sum(text.token_count for text in self._texts), cached)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        """Wait for news and take all of it."""
        if self._stream is None:
            await self.accepted()
        stream = self._stream
        assert stream is not None
        try:
            while self._unfinished:
                if self._wants_prompt:
                    await self._read_prompt_logprobs(stream)
                if stream.ready:
                    return self._read(stream)
                if stream.error is not None:
                    raise self._named(stream.error)
                await stream.changed()
        except BaseException:
            self._abort()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the request in the engine core if it isn't over; its reader gets CANCELLED. Idempotent, from any task."""
        self._abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()

    # -------------------------- reading

    def _read(self, stream: RequestStream) -> list[Delta]:
        """Everything unread; there is something."""
        ready, stream.ready = stream.ready, []
        deltas: list[Delta] = []
        for sequence in ready:
            text = self._texts[sequence.index]
            deltas += text.read(sequence)
            if text.over:
                self._unfinished -= 1
                self._client.abort_sequence(sequence)  # still open if a stop string ended it
        return deltas

    async def _read_prompt_logprobs(self, stream: RequestStream) -> None:
        if self.prompt_logprobs is None:
            first = self._request.prompt_ids[:1]
            self.prompt_logprobs = [TokenLogprob(id, self._tokenizer.token_text(id), None, None) for id in first]
        while stream.prompt_logprobs:
            stretch = stream.prompt_logprobs.pop(0)
            count = len(stretch.logprobs) // 4
            described = self._request.prompt_ids[stretch.start : stretch.start + count]
            if stretch.start != len(self.prompt_logprobs) or len(described) != count:
                raise ApiError(
                    Code.INTERNAL, f"prompt logprobs of {count} tokens from {stretch.start} are out of place"
                )
            work = (self._tokenizer, described, stretch)
            if count * (1 + stretch.top) <= INLINE_LOGPROBS:
                self.prompt_logprobs += _prompt_logprobs(*work)
            else:
                self.prompt_logprobs += await asyncio.to_thread(_prompt_logprobs, *work)

    def _named(self, error: ApiError) -> ApiError:
        """The engine core's error, blaming a grammar by the client's own name for it."""
        if error.parameter == "grammar" and self._request.grammar is not None:
            error.parameter = self._request.grammar.field
        return error

    def _new_text(self) -> SequenceText:
        return SequenceText(self._tokenizer, self._request, self._stops)

    def _abort(self) -> None:
        self._closed = True
        stream = self._stream
        if stream is not None and self._unfinished:
            self._client.abort(stream)
            stream.fail(ApiError(Code.CANCELLED, "the generation was closed"))


# ------------------------------ one sequence


class SequenceText:
    """One sequence's tokens on their way to text."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_matcher",
        "_min_tokens",
        "_plain",
        "_push",
        "_special_ids",
        "_stop_ids",
        "_tokenizer",
        "_wants_logprobs",
        "over",
        "token_count",
    )

    def __init__(self, tokenizer: Tokenizer, request: TextRequest, stops: StopStrings | None) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(request.skip_special_tokens)
        self._push = self._detokenizer.push
        self._matcher = None if stops is None else stops.matcher()
        self._include_stop = request.include_stop
        self._min_tokens = request.sampling.min_tokens or 0
        self._stop_ids = request.sampling.stop_token_ids
        self._special_ids = tokenizer.special_ids
        self._wants_logprobs = request.sampling.logprobs is not None
        self._plain = stops is None and not self._wants_logprobs
        self.over = False
        self.token_count = 0

    def read(self, sequence: Sequence) -> list[Delta]:
        """Deltas of everything unread; the last one has the finish reason if that is the sequence's end.

        Raises ApiError (INTERNAL) if logprobs were asked for and don't stand beside the tokens.
        """
        tokens, logprobs, finished = sequence.take()
        index = sequence.index
        if self._plain and finished is None:
            self.token_count += len(tokens)
            push = self._push
            if len(tokens) == 1:  # the usual case
                return [Delta(index, push(tokens[0]), tokens)]
            return [Delta(index, "".join([push(token) for token in tokens]), tokens)]
        deltas = self._deltas(index, tokens, finished)
        if self._wants_logprobs:
            if len(logprobs) != len(tokens):
                raise ApiError(Code.INTERNAL, "the engine core left out logprobs")
            for delta, raw in zip(deltas, logprobs, strict=False):  # a stop string may have cut the deltas
                delta.logprobs = [_token_logprob(self._tokenizer, delta.token_ids[0], raw)]
        if finished is not None and not self.over:
            self._end(index, deltas, finished)
        return deltas

    def _deltas(self, index: int, tokens: list[int], finished: Finished | None) -> list[Delta]:
        deltas: list[Delta] = []
        closing = len(tokens) - 1 if finished is not None and self._hidden(finished.stop_token_id) else -1
        for position, token in enumerate(tokens):
            self.token_count += 1
            delta = Delta(index, "" if position == closing else self._push(token), [token])
            deltas.append(delta)
            if self._matcher is not None and self.token_count > self._min_tokens:
                self._match(delta)
                if self.over:
                    break
        return deltas

    def _hidden(self, stop_token_id: int | None) -> bool:
        """Whether the closing id's text is left out."""
        return stop_token_id is not None and not (self._include_stop and stop_token_id not in self._special_ids)

    def _match(self, delta: Delta) -> None:
        """Replace the delta's text by what may be shown; end the sequence at a stop string."""
        assert self._matcher is not None
        result = self._matcher.push(delta.text)
        if isinstance(result, StopMatch):
            delta.text = result.text + (result.stop if self._include_stop else "")
            delta.finish_reason, delta.stop_reason = "stop", result.stop
            self.over = True
        else:
            delta.text = result

    def _end(self, index: int, deltas: list[Delta], finished: Finished) -> None:
        """The engine core ended the sequence: release what was held back, into the last delta."""
        last = deltas[-1] if deltas else Delta(index, "", [])
        rest = Delta(index, self._detokenizer.finish(), [])
        if self._matcher is not None:
            if rest.text and self.token_count > self._min_tokens:
                self._match(rest)
            if not self.over:
                rest.text += self._matcher.flush()
        last.text += rest.text
        last.finish_reason, last.stop_reason = rest.finish_reason, rest.stop_reason
        if not self.over:
            last.finish_reason = finished.reason
            last.stop_reason = finished.stop_token_id if finished.stop_token_id in self._stop_ids else None
            self.over = True
        if not deltas:
            deltas.append(last)


# ------------------------------ conversions


def _stop_strings(stops: tuple[str, ...]) -> StopStrings | None:
    if len(stops) > MAX_STOP_STRINGS:
        raise ApiError(
            Code.INVALID_ARGUMENT, f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop"
        )
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise ApiError(
                Code.INVALID_ARGUMENT,
                f"a stop string has {len(stop)} characters; it must have 1 to {MAX_STOP_CHARS}",
                "stop",
            )
    return StopStrings(stops) if stops else None


def _token_logprob(tokenizer: Tokenizer, token: int, raw: RawLogprob) -> TokenLogprob:
    text = tokenizer.token_text
    top = tuple(TopLogprob(id, text(id), logprob) for id, logprob in raw.top)
    return TokenLogprob(token, text(token), raw.logprob, raw.rank, top)


def _prompt_logprobs(tokenizer: Tokenizer, ids: list[int], stretch: pb.PromptLogprobs) -> list[TokenLogprob]:
    """Raises ApiError (INTERNAL) for columns that don't belong together."""
    try:
        rows = prompt_rows(stretch)
    except ProtocolViolation as error:
        raise ApiError(Code.INTERNAL, str(error)) from error
    return [_token_logprob(tokenizer, token, row) for token, row in zip(ids, rows, strict=True)]
