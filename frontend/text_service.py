"""The text gRPC service: greenlane.text.v1 over the same requests as the HTTP API.

Owns the mapping of its messages. Sends nothing, not even initial
metadata, before the engine core has accepted the request. A cancelled or expired call leaves its request's context,
which ends it in the engine core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from greenlane.text.v1 import text_pb2, text_pb2_grpc

from frontend.chat_template import MAX_MESSAGES
from frontend.grpc_call import MAX_LABEL_CHARS, deadline_s, with_status
from frontend.openai_fields import decode_object, invalid
from frontend.openai_types import MAX_N, MAX_SALT_BYTES
from frontend.request import (
    ChatPrompt,
    Delta,
    Grammar,
    Sampling,
    TextRequest,
    TokenLogprob,
    Usage,
)
from frontend.serving import Served
from frontend.text_tools import CallSeparator, asked_tools, template_message
from frontend.tools import Tools
from frontend.wire import MAX_LOGIT_BIAS, MAX_STOP_IDS, cap

SERVICE = text_pb2.DESCRIPTOR.services_by_name["Text"].full_name


class TextService(text_pb2_grpc.TextServicer):
    """The servicer over one served model."""

    def __init__(self, served: Served, new_id: Callable[[], str]) -> None:
        self._served = served
        self._new_id = new_id

    @with_status
    async def Generate(self, request: text_pb2.GenerateRequest, context: Any) -> None:
        with self._served.call():
            await self._generate(request, context)

    async def _generate(self, request: text_pb2.GenerateRequest, context: Any) -> None:
        request_id = request.request_id[:MAX_LABEL_CHARS] or self._new_id()
        with self._served.refusals_counted():
            self._served.check_model(_given(request, "model"))
            sampling, tools = _sampling(request.sampling), asked_tools(request.chat)
            ids, echo = await self._prompt(request, tools)
            asked = _text_request(request, request_id, ids, sampling, _grammar(request, tools), deadline_s(context))
        calls = None if tools is None else CallSeparator(sampling.n or 1)
        async with self._served.start(asked) as answer:
            await answer.accepted()
            echoed: set[int] = set()
            described = not request.sampling.HasField("prompt_logprobs")
            async for deltas in answer:
                message = text_pb2.GenerateResponse(request_id=request_id, deltas=_merged(deltas, calls, echo, echoed))
                if not described:
                    message.prompt_logprobs.extend(map(_logprob, answer.prompt_logprobs))
                    described = True
                await context.write(message)
            await context.write(text_pb2.GenerateResponse(request_id=request_id, usage=_usage(answer.usage)))

    @with_status
    async def Tokenize(self, request: text_pb2.TokenizeRequest, context: Any) -> text_pb2.TokenizeResponse:
        self._served.check_model(_given(request, "model"))
        if request.WhichOneof("input") is None:
            raise invalid("input is missing: set prompt or chat", "input")
        is_chat = request.HasField("chat")
        chat = _chat(request.chat, asked_tools(request.chat)) if is_chat else None
        text = request.prompt if chat is None else await self._served.render(chat)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else not is_chat
        ids = await self._served.encode(text, special)
        return text_pb2.TokenizeResponse(ids=ids, max_model_len=self._served.max_model_len)

    @with_status
    async def Detokenize(self, request: text_pb2.DetokenizeRequest, context: Any) -> text_pb2.DetokenizeResponse:
        self._served.check_model(_given(request, "model"))
        text = await self._served.decode(request.ids, request.skip_special_tokens, "ids")
        return text_pb2.DetokenizeResponse(text=text)

    @with_status
    async def ListModels(self, request: text_pb2.ListModelsRequest, context: Any) -> text_pb2.ListModelsResponse:
        length = self._served.max_model_len
        return text_pb2.ListModelsResponse(
            models=[text_pb2.Model(id=name, max_model_len=length) for name in self._served.names]
        )

    async def _prompt(self, request: text_pb2.GenerateRequest, tools: Tools | None) -> tuple[list[int], str]:
        """The prompt's ids, and the text to stand before the first delta (empty without `echo`)."""
        match request.WhichOneof("input"):
            case "prompt":
                text, ids = request.prompt, await self._served.encode(request.prompt)
            case "chat":
                text = await self._served.render(_chat(request.chat, tools))
                ids = await self._served.encode(text, add_special_tokens=False)
            case "prompt_ids":
                self._served.check_length(len(request.prompt_ids.ids))
                ids = list(request.prompt_ids.ids)
                skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
                text = await self._served.decode(ids, skip, "prompt_ids") if request.echo else ""
            case _:
                raise invalid("input is missing: set prompt, chat or prompt_ids", "input")
        return ids, text if request.echo else ""


# ------------------------------ requests


def _given(message: Any, name: str) -> Any:
    """A field with presence, None where it is absent."""
    return getattr(message, name) if message.HasField(name) else None


def _chat(chat: text_pb2.Chat, tools: Tools | None) -> ChatPrompt:
    cap("messages", len(chat.messages), MAX_MESSAGES)
    kwargs = chat.template_kwargs_json
    return ChatPrompt(
        [template_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages)],
        add_generation_prompt=not chat.HasField("add_generation_prompt") or chat.add_generation_prompt,
        tools=[] if tools is None else tools.offered,
        template_kwargs=decode_object(kwargs.encode(), "template_kwargs_json") if kwargs else {},
    )


def _sampling(message: text_pb2.Sampling) -> Sampling:
    if message.HasField("n") and not 1 <= message.n <= MAX_N:
        raise invalid(f"n is {message.n}; it must be from 1 to {MAX_N}", "n")
    cap("stop_token_ids", len(message.stop_token_ids), MAX_STOP_IDS)
    cap("logit_bias", len(message.logit_bias), MAX_LOGIT_BIAS)
    return Sampling(
        temperature=_given(message, "temperature"),
        top_p=_given(message, "top_p"),
        top_k=_given(message, "top_k"),
        min_p=_given(message, "min_p"),
        seed=_given(message, "seed"),
        repetition_penalty=_given(message, "repetition_penalty"),
        presence_penalty=_given(message, "presence_penalty"),
        frequency_penalty=_given(message, "frequency_penalty"),
        logit_bias=dict(message.logit_bias),
        max_tokens=_given(message, "max_tokens"),
        min_tokens=_given(message, "min_tokens"),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=_given(message, "ignore_eos"),
        n=_given(message, "n"),
        logprobs=_given(message, "logprobs"),
        prompt_logprobs=_given(message, "prompt_logprobs"),
    )


def _grammar(request: text_pb2.GenerateRequest, tools: Tools | None) -> Grammar | None:
    if not request.HasField("grammar"):
        return None if tools is None else tools.grammar
    if tools is not None:
        raise invalid("grammar can't be combined with tools: a call is no such text", "grammar")
    kind = request.grammar.WhichOneof("grammar")
    if kind is None:
        raise invalid("grammar is empty: set json_schema, regex, lark, choice or structural_tag", "grammar")
    return Grammar(kind, getattr(request.grammar, kind))


def _text_request(
    request: text_pb2.GenerateRequest,
    request_id: str,
    ids: list[int],
    sampling: Sampling,
    grammar: Grammar | None,
    deadline: float | None,
) -> TextRequest:
    salt = _given(request, "cache_salt")
    if salt is not None and len(salt.encode()) > MAX_SALT_BYTES:
        raise invalid(f"cache_salt has {len(salt.encode())} bytes; at most {MAX_SALT_BYTES} are allowed", "cache_salt")
    return TextRequest(
        prompt_ids=ids,
        sampling=sampling,
        stop=tuple(request.sampling.stop),
        include_stop=request.sampling.include_stop,
        skip_special_tokens=not request.HasField("skip_special_tokens") or request.skip_special_tokens,
        priority=request.priority,
        cache_salt=salt,
        deadline_s=deadline,
        label=request_id,
        grammar=grammar,
    )


# ------------------------------ answers


def _merged(deltas: Iterable[Delta], calls: CallSeparator | None, echo: str, echoed: set[int]) -> list[text_pb2.Delta]:
    """One message a run of deltas of the same sequence; `echo` stands before a sequence's first text."""
    messages: list[text_pb2.Delta] = []
    for delta in deltas:
        if not messages or messages[-1].index != delta.index:
            messages.append(text_pb2.Delta(index=delta.index))
        message = messages[-1]
        if echo and delta.index not in echoed:
            echoed.add(delta.index)
            message.text += echo
        if calls is not None:
            message.tool_calls.extend(calls.take(delta))
        message.text += delta.text
        message.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            message.logprobs.extend(map(_logprob, delta.logprobs))
        if delta.finish_reason is not None:
            message.finish_reason = delta.finish_reason
            if delta.stop_reason is not None:
                message.stop_reason = str(delta.stop_reason)
    return messages


def _logprob(entry: TokenLogprob) -> text_pb2.TokenLogprob:
    tops: Sequence[text_pb2.TopLogprob] = [
        text_pb2.TopLogprob(id=top.id, token=top.token, logprob=top.logprob) for top in entry.top
    ]
    return text_pb2.TokenLogprob(id=entry.id, token=entry.token, logprob=entry.logprob, rank=entry.rank, top=tops)


def _usage(usage: Usage) -> text_pb2.Usage:
    return text_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
