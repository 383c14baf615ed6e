"""Deltas as OpenAI's server-sent events, one event a delta, at a fraction of a microsecond each.

Owns the chunks of both streamed APIs. What doesn't change between a sequence's events is encoded once: the common event
is bytes before the text, the text as JSON, bytes after it. Events that hold more are built as dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from frontend.openai_fields import Json
from frontend.openai_shapes import chat_logprobs, completion_logprobs, usage_shape
from frontend.openai_types import Options
from frontend.reasoning import ReasoningSplitter
from frontend.request import Delta, TokenLogprob
from frontend.tools import CallSplitter, finish_reason

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    object: str
    created: int
    """Unix seconds."""
    model: str

    def fields(self) -> Json:
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}


class Frame:
    """The bytes around the choices of one answer's events."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self.open = b"data: " + _encode({**head.fields(), "system_fingerprint": None})[:-1] + b',"choices":['
        self.close = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def event(self, choice: Json, usage: Json | None = None, extra: Json | None = None) -> bytes:
        """One event with one choice; `extra` are fields beside the choices."""
        tail = self.close if usage is None else b'],"usage":' + _encode(usage) + b"}\n\n"
        if extra:
            tail = b"]," + _encode(extra)[1:-1] + tail[1:]
        return self.open + _encode(choice) + tail

    def usage_event(self, usage: Json) -> bytes:
        """The event after the last choice's."""
        return self.open + b'],"usage":' + _encode(usage) + b"}\n\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the events tell of the prompt."""

    ids: Sequence[int]
    echo: str | None = None
    """Its text, to stand before the first delta's."""


class CompletionEvents:
    """The events of one prompt's sequences in `/v1/completions`; their indexes start at `base`."""

    def __init__(self, frame: Frame, options: Options, prompt: Prompt, base: int, *, logprobs: bool) -> None:
        self._frame = frame
        self._prompt = prompt
        self._base = base
        self._logprobs = logprobs
        self._ids = options.return_token_ids
        self._tokens = [0] * options.n if options.continuous_usage else None
        self._offsets = [0] * options.n
        self._started = [False] * options.n
        self._plain = not (logprobs or options.return_token_ids)
        self._before = [frame.open + b'{"index":%d,"text":' % (base + i) for i in range(options.n)]
        rest = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
        self._after, self._before_usage = rest + frame.close, rest + b'],"usage":'

    def events(self, deltas: Sequence[Delta], echoed: Sequence[TokenLogprob] = ()) -> bytes:
        """Their events in one piece; `echoed` are the prompt's logprobs, read with a sequence's first delta."""
        parts: list[bytes] = []
        for delta in deltas:
            if self._plain and self._started[delta.index] and delta.finish_reason is None:
                parts += (self._before[delta.index], _encode(delta.text), self._ending(delta))
            else:
                parts.append(self._full(delta, echoed))
        return b"".join(parts)

    def _ending(self, delta: Delta) -> bytes:
        usage = _counted(self._tokens, delta, self._prompt)
        return self._after if usage is None else self._before_usage + _encode(usage) + b"}\n\n"

    def _full(self, delta: Delta, echoed: Sequence[TokenLogprob]) -> bytes:
        index, text, entries = delta.index, delta.text, delta.logprobs or ()
        first, self._started[index] = not self._started[index], True
        if first and self._prompt.echo is not None:
            text, entries = self._prompt.echo + text, (*echoed, *entries)
        choice: Json = {"index": self._base + index, "text": text, "logprobs": None}
        if self._logprobs:
            choice["logprobs"] = completion_logprobs(entries, self._offsets[index])
            self._offsets[index] += sum(len(entry.token) for entry in entries)
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self._ids:
            choice["prompt_token_ids"] = self._prompt.ids if first else None
            choice["token_ids"] = delta.token_ids
        return self._frame.event(choice, _counted(self._tokens, delta, self._prompt))


class ChatEvents:
    """The events of one chat's sequences in `/v1/chat/completions`."""

    def __init__(
        self,
        frame: Frame,
        options: Options,
        prompt: Prompt,
        *,
        splitters: Sequence[ReasoningSplitter] | None,
        calls: Sequence[CallSplitter] | None = None,
        token_bytes: Callable[[int], bytes] | None,
    ) -> None:
        """`splitters`: one a sequence, for a model that thinks; `calls`: the same for a chat that offers tools;
        `token_bytes`: set where logprobs are wanted."""
        self._frame = frame
        self._prompt = prompt
        self._splitters = splitters
        self._calls = calls
        self._token_bytes = token_bytes
        self._ids = options.return_token_ids
        self._tokens = [0] * options.n if options.continuous_usage else None
        self._plain = token_bytes is None and not (options.return_token_ids or options.continuous_usage)
        opens = [frame.open + b'{"index":%d,"delta":{' % i for i in range(options.n)]
        self._before_content = [start + b'"content":' for start in opens]
        self._before_reasoning = [start + b'"reasoning_content":' for start in opens]
        self._after = b'},"logprobs":null,"finish_reason":null}' + frame.close

    def opening(self) -> bytes:
        """The first event of every sequence: the role."""
        extra: Json | None = {"prompt_token_ids": self._prompt.ids} if self._ids else None
        events: list[bytes] = []
        for index in range(len(self._before_content)):
            choice: Json = {"index": index, "delta": {"role": "assistant", "content": ""}}
            choice |= {"logprobs": None, "finish_reason": None}
            usage = None if self._tokens is None else usage_shape(len(self._prompt.ids), 0, 0)
            events.append(self._frame.event(choice, usage, extra))
        return b"".join(events)

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Their events in one piece; a delta whose text is held back has none if nothing else is in it."""
        parts: list[bytes] = []
        for delta in deltas:
            reasoning, content = self._split(delta)
            called: list[Json] = []
            if self._calls is not None:
                content, called = self._take_calls(self._calls[delta.index], delta, content)
            if not self._plain or called or delta.finish_reason is not None:
                parts.append(self._full(delta, reasoning, content, called))
                continue
            if reasoning:
                text = _encode(reasoning)
                parts += (self._before_reasoning[delta.index], text, b',"reasoning":', text, self._after)
            if content:
                parts += (self._before_content[delta.index], _encode(content), self._after)
        return b"".join(parts)

    def _split(self, delta: Delta) -> tuple[str, str]:
        if self._splitters is None:
            return "", delta.text
        splitter = self._splitters[delta.index]
        reasoning, content = splitter.feed(delta.text)
        if delta.finish_reason is None:
            return reasoning, content
        last_reasoning, last_content = splitter.finish()
        return reasoning + last_reasoning, content + last_content

    @staticmethod
    def _take_calls(splitter: CallSplitter, delta: Delta, content: str) -> tuple[str, list[Json]]:
        said = splitter.feed(content)
        if delta.finish_reason is not None:
            last = splitter.finish()
            said.content, said.calls = said.content + last.content, said.calls + last.calls
        return said.content, said.calls

    def _full(self, delta: Delta, reasoning: str, content: str, called: list[Json]) -> bytes:
        said: Json = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
        if content:
            said["content"] = content
        if called:
            said["tool_calls"] = called
        reason = finish_reason(delta.finish_reason, None if self._calls is None else self._calls[delta.index])
        choice: Json = {"index": delta.index, "delta": said, "logprobs": None, "finish_reason": reason}
        if self._token_bytes is not None and delta.logprobs is not None:
            choice["logprobs"] = chat_logprobs(delta.logprobs, self._token_bytes)
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._ids:
            choice["token_ids"] = delta.token_ids
        return self._frame.event(choice, _counted(self._tokens, delta, self._prompt))


def _counted(tokens: list[int] | None, delta: Delta, prompt: Prompt) -> Json | None:
    """The usage so far of a delta's sequence, where every event tells it."""
    if tokens is None:
        return None
    tokens[delta.index] += len(delta.token_ids)
    return usage_shape(len(prompt.ids), tokens[delta.index], 0)
