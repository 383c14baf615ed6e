"""The OpenAI-style endpoints: a checked body becomes requests, their deltas become an answer of OpenAI's shape.

Owns the flow of `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/tokenize` and `/detokenize`. Bodies are
checked in `openai_types.py`; how an answer looks is in `openai_shapes.py` and `openai_stream.py`. No header is sent
before the engine core has accepted every request of a call, so a refusal always has its own status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.http_server import Exchange, Routes
from frontend.open_request import OpenRequest
from frontend.openai_fields import Json, decode_object
from frontend.openai_shapes import Collected, chat_logprobs, completion_logprobs, prompt_logprobs, total_usage
from frontend.openai_stream import ChatEvents, CompletionEvents, Frame, Head, Prompt
from frontend.openai_types import (
    ChatBody,
    CompletionBody,
    Options,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from frontend.reasoning import ReasoningSplitter, opens_thinking
from frontend.request import ApiError, Delta, TextRequest
from frontend.serving import Served
from frontend.tools import CallSplitter, called, finish_reason
from frontend.turns import Turns

CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""What the engine core blames → what a chat calls it."""

TURN = 16
"""Requests of one call that are begun before the event loop serves others (some ms)."""
CALLS = 4
"""Calls that begin together (some 0.3 ms of work each), and go to the engine core in one message …"""
CALL_TURNS = 8
"""… and the turns of the event loop until the next may begin."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of a call, on its way."""

    prompt: Prompt
    request: OpenRequest


class OpenAiApi:
    """Handlers over one served model."""

    def __init__(self, served: Served, clock: Callable[[], float], new_id: Callable[[], str]) -> None:
        """`clock` gives Unix seconds; `new_id` something unique for the ids of answers."""
        self._served = served
        self._clock = clock
        self._new_id = new_id
        self._started = int(clock())
        self._turns = Turns(CALLS, CALL_TURNS)

    def routes(self) -> Routes:
        return {
            "/v1/completions": {"POST": self.completions},
            "/v1/chat/completions": {"POST": self.chat},
            "/v1/models": {"GET": self.models},
            "/v1/models/*": {"GET": self.model},
            "/tokenize": {"POST": self.tokenize},
            "/detokenize": {"POST": self.detokenize},
        }

    # ------------------------------ completions

    async def completions(self, exchange: Exchange) -> None:
        with self._served.call():
            await self._turns.mine()
            with self._served.refusals_counted():
                body = parse_completion(decode_object(await exchange.body()))
                self._served.check_model(body.options.model)
            await exchange.unless_gone(self._complete(exchange, body))

    async def _complete(self, exchange: Exchange, body: CompletionBody) -> None:
        prompts: list[Prompt] = []
        for prompt in body.prompts:
            with self._served.refusals_counted():
                prompts.append(await self._prompt(body, prompt))
            await asyncio.sleep(0)  # other streams' events don't wait for a thousand prompts
        head = self._head("cmpl-", "text_completion")
        async with self._ask(head.id, body.options, prompts) as asked:
            if body.options.stream:
                await self._stream_completion(exchange, body, head, asked)
            else:
                await exchange.answer(await self._whole_completion(body, head, asked))

    async def _prompt(self, body: CompletionBody, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            ids = await self._served.encode(prompt, body.options.add_special_tokens)
            return Prompt(ids, prompt if body.echo else None)
        text = await self._served.decode(prompt, body.options.skip_special_tokens, "prompt") if body.echo else None
        return Prompt(prompt, text)

    async def _stream_completion(
        self, exchange: Exchange, body: CompletionBody, head: Head, asked: Sequence[Asked]
    ) -> None:
        options = body.options
        frame = Frame(head, options.include_usage)
        await exchange.start_events()

        async def pump(position: int, one: Asked) -> None:
            chunks = CompletionEvents(frame, options, one.prompt, position * options.n, logprobs=body.logprobs)
            async for deltas in one.request:
                shown = deltas if body.generate else _without_output(deltas)
                if shown:
                    await exchange.write(chunks.events(shown, one.request.prompt_logprobs))

        await _all([pump(position, one) for position, one in enumerate(asked)])
        usage = total_usage((one.request.usage for one in asked), body.generate)
        await exchange.finish_events(frame.usage_event(usage) if options.include_usage else b"")

    async def _whole_completion(self, body: CompletionBody, head: Head, asked: Sequence[Asked]) -> bytes:
        answers = await _all([_collect(one.request, body.options.n, body.generate) for one in asked])
        choices: list[Json] = []
        for one, sequences in zip(asked, answers, strict=True):
            for sequence in sequences:
                choices.append(_completion_choice(len(choices), body, one, sequence))
        usage = total_usage((one.request.usage for one in asked), body.generate)
        return _whole(head, choices, usage)

    # ------------------------------ chat

    async def chat(self, exchange: Exchange) -> None:
        with self._served.call():
            await self._turns.mine()
            with self._served.refusals_counted():
                body = parse_chat(decode_object(await exchange.body()))
                self._served.check_model(body.options.model)
            await exchange.unless_gone(self._chat(exchange, body))

    async def _chat(self, exchange: Exchange, body: ChatBody) -> None:
        with self._served.refusals_counted():
            text = await self._served.render(body.chat)
            prompt = Prompt(await self._served.encode(text, body.options.add_special_tokens))
        splitters = None
        if self._served.thinks and body.options.grammar is None:  # a grammar leaves no room for thoughts
            splitters = [ReasoningSplitter(opens_thinking(text)) for _ in range(body.options.n)]
        head = self._head("chatcmpl-", "chat.completion.chunk" if body.options.stream else "chat.completion")
        try:
            async with self._ask(head.id, body.options, [prompt]) as asked:
                if body.options.stream:
                    await self._stream_chat(exchange, body, head, asked[0], splitters)
                else:
                    await exchange.answer(await self._whole_chat(body, head, asked[0], splitters))
        except ApiError as error:
            error.parameter = CHAT_NAMES.get(error.parameter or "", error.parameter)
            raise

    async def _stream_chat(
        self,
        exchange: Exchange,
        body: ChatBody,
        head: Head,
        one: Asked,
        splitters: Sequence[ReasoningSplitter] | None,
    ) -> None:
        frame = Frame(head, body.options.include_usage)
        token_bytes = self._served.tokenizer.token_bytes if body.logprobs else None
        calls = None if body.tools is None else [CallSplitter() for _ in range(body.options.n)]
        chunks = ChatEvents(frame, body.options, one.prompt, splitters=splitters, calls=calls, token_bytes=token_bytes)
        await exchange.start_events()
        await exchange.write(chunks.opening())
        async for deltas in one.request:
            events = chunks.events(deltas)
            if events:
                await exchange.write(events)
        usage = total_usage([one.request.usage])
        await exchange.finish_events(frame.usage_event(usage) if body.options.include_usage else b"")

    async def _whole_chat(
        self, body: ChatBody, head: Head, one: Asked, splitters: Sequence[ReasoningSplitter] | None
    ) -> bytes:
        sequences = await _collect(one.request, body.options.n)
        choices = [
            self._chat_choice(index, body, sequence, None if splitters is None else splitters[index])
            for index, sequence in enumerate(sequences)
        ]
        extra: Json = {}
        if body.options.prompt_logprobs:
            extra["prompt_logprobs"] = prompt_logprobs(one.request.prompt_logprobs)
        if body.options.return_token_ids:
            extra["prompt_token_ids"] = one.prompt.ids
        return _whole(head, choices, total_usage([one.request.usage]), extra)

    def _chat_choice(self, index: int, body: ChatBody, sequence: Collected, splitter: ReasoningSplitter | None) -> Json:
        message: Json = {"role": "assistant", "content": sequence.text, "refusal": None}
        if splitter is not None:
            first, last = splitter.feed(sequence.text), splitter.finish()
            reasoning, content = first[0] + last[0], first[1] + last[1]
            message |= {
                "content": content or None,
                "reasoning_content": reasoning or None,
                "reasoning": reasoning or None,
            }
        calls = None if body.tools is None else CallSplitter()
        if calls is not None:
            message |= called(calls, str(message["content"] or ""))
        logprobs = chat_logprobs(sequence.logprobs, self._served.tokenizer.token_bytes) if body.logprobs else None
        choice: Json = {"index": index, "message": message, "logprobs": logprobs}
        reason = finish_reason(sequence.finish_reason, calls)
        choice |= {"finish_reason": reason, "stop_reason": sequence.stop_reason}
        if body.options.return_token_ids:
            choice["token_ids"] = sequence.token_ids
        return choice

    # ------------------------------ models and tokens

    async def models(self, exchange: Exchange) -> None:
        await exchange.answer(msgspec.json.encode({"object": "list", "data": [*map(self._model, self._served.names)]}))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        self._served.check_model(name)
        await exchange.answer(msgspec.json.encode(self._model(name)))

    def _model(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "greenlane",
            "root": self._served.names[0],
            "parent": None,
            "max_model_len": self._served.max_model_len or None,
        }

    async def tokenize(self, exchange: Exchange) -> None:
        body = parse_tokenize(decode_object(await exchange.body()))
        self._served.check_model(body.model)
        text = body.input if isinstance(body.input, str) else await self._served.render(body.input)
        ids = await self._served.encode(text, body.add_special_tokens)
        token_text = self._served.tokenizer.token_text
        texts = [token_text(token) for token in ids] if body.return_token_strs else None
        shape = {
            "count": len(ids),
            "max_model_len": self._served.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }
        await exchange.answer(msgspec.json.encode(shape))

    async def detokenize(self, exchange: Exchange) -> None:
        body = parse_detokenize(decode_object(await exchange.body()))
        self._served.check_model(body.model)
        text = await self._served.decode(body.ids, skip_special_tokens=False, parameter="tokens")
        await exchange.answer(msgspec.json.encode({"prompt": text}))

    # ------------------------------ what both kinds of call share

    def _head(self, prefix: str, kind: str) -> Head:
        return Head(prefix + self._new_id(), kind, int(self._clock()), self._served.names[0])

    @contextlib.asynccontextmanager
    async def _ask(self, label: str, options: Options, prompts: Sequence[Prompt]) -> AsyncIterator[list[Asked]]:
        """Every prompt accepted, or none; leaving the context, for whatever reason, ends all of them."""
        async with contextlib.AsyncExitStack() as stack:
            asked: list[Asked] = []
            for prompt in prompts:
                request = self._served.start(_text_request(label, options, prompt))
                asked.append(Asked(prompt, await stack.enter_async_context(request)))
                if len(asked) % TURN == 0:
                    await asyncio.sleep(0)
            await _all([one.request.accepted() for one in asked])
            yield asked


def _text_request(label: str, options: Options, prompt: Prompt) -> TextRequest:
    return TextRequest(
        prompt_ids=list(prompt.ids),
        sampling=options.sampling,
        stop=options.stop,
        include_stop=options.include_stop,
        skip_special_tokens=options.skip_special_tokens,
        priority=options.priority,
        cache_salt=options.cache_salt,
        label=label,
        grammar=options.grammar,
    )


def _without_output(deltas: Sequence[Delta]) -> list[Delta]:
    """The last deltas of sequences that were to score their prompt only: the engine core draws one token at least."""
    ends = [delta for delta in deltas if delta.finish_reason is not None]
    return [Delta(delta.index, "", [], None, finish_reason="length") for delta in ends]


async def _collect(request: OpenRequest, n: int, generate: bool = True) -> list[Collected]:
    sequences = [Collected() for _ in range(n)]
    async for deltas in request:
        for delta in deltas if generate else _without_output(deltas):
            sequences[delta.index].add(delta)
    return sequences


async def _all(works: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run them together; the first failure ends the others and is raised by itself."""
    if len(works) == 1:
        return [await works[0]]
    tasks: list[asyncio.Task[Any]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                tasks.append(group.create_task(work))
                if len(tasks) % TURN == 0:
                    await asyncio.sleep(0)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for work in works[len(tasks) :]:
            work.close()
    return [task.result() for task in tasks]


def _completion_choice(index: int, body: CompletionBody, one: Asked, sequence: Collected) -> Json:
    text, entries = sequence.text, sequence.logprobs
    if one.prompt.echo is not None:
        text, entries = one.prompt.echo + text, [*one.request.prompt_logprobs, *entries]
    choice: Json = {"index": index, "text": text}
    choice["logprobs"] = completion_logprobs(entries, 0) if body.logprobs else None
    choice |= {"finish_reason": sequence.finish_reason, "stop_reason": sequence.stop_reason}
    if body.options.prompt_logprobs:
        choice["prompt_logprobs"] = prompt_logprobs(one.request.prompt_logprobs)
    if body.options.return_token_ids:
        choice |= {"prompt_token_ids": one.prompt.ids, "token_ids": sequence.token_ids}
    return choice


def _whole(head: Head, choices: list[Json], usage: Json, extra: Json | None = None) -> bytes:
    shape = {**head.fields(), "system_fingerprint": None, "choices": choices, "usage": usage, **(extra or {})}
    return msgspec.json.encode(shape)
