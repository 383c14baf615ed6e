"""Bodies of the OpenAI-style endpoints as checked data: JSON in, plain values out, or a refusal that names the field.

Owns which fields exist, their types and defaults, and which are refused because this server doesn't do what they ask.
Fields that nobody knows are ignored, as OpenAI's server and vLLM ignore them. Knows no tokenizer and no engine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

from frontend.grammar import asked_grammar
from frontend.openai_fields import INT32_MAX, UINT64_MAX, Fields, Json, invalid, kind
from frontend.request import ChatPrompt, Grammar, Sampling
from frontend.tools import Tools, asked_tools, past_calls

MAX_PROMPTS = 1024
MAX_PROMPT_IDS = 1 << 20
MAX_SEQUENCES = 4096
"""Prompts x n of one call."""
MAX_N = 128
MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_BIASES = 1024
MAX_STOP_IDS = 128
MAX_SALT_BYTES = 256
DEFAULT_COMPLETION_TOKENS = 16

_REFUSED = (
    "suffix",
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "documents",
    "chat_template",
    "mm_processor_kwargs",
    "logits_processors",
    "allowed_token_ids",
    "bad_words",
    "use_beam_search",
    "truncate_prompt_tokens",
    "prompt_embeds",
    "kv_transfer_params",
)
"""Fields that would change the answer and that this server doesn't serve: silence about them would be a lie."""

PromptIds = list[int]


@dataclass(frozen=True, slots=True)
class Options:
    """What both kinds of call share."""

    model: str | None
    sampling: Sampling
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    add_special_tokens: bool
    priority: int
    cache_salt: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    prompt_logprobs: bool
    """The answer shows them by themselves; `echo` asks for them too, in another place."""
    grammar: Grammar | None = None

    @property
    def n(self) -> int:
        return 1 if self.sampling.n is None else self.sampling.n


@dataclass(frozen=True, slots=True)
class CompletionBody:
    options: Options
    prompts: list[str] | list[PromptIds]
    echo: bool
    logprobs: bool
    generate: bool
    """False for echo with max_tokens 0: the prompt is scored, nothing is added."""


@dataclass(frozen=True, slots=True)
class ChatBody:
    options: Options
    chat: ChatPrompt
    logprobs: bool
    tools: Tools | None = None


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    model: str | None
    input: str | ChatPrompt
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeBody:
    model: str | None
    ids: PromptIds


def parse_completion(body: Json) -> CompletionBody:
    """`/v1/completions`; raises ApiError (INVALID_ARGUMENT) naming the first field that can't be served."""
    fields = Fields(body)
    _refuse_unserved(fields)
    if fields.raw("tools"):
        raise invalid("tools belong to /v1/chat/completions; leave them out", "tools")
    echo = fields.flag("echo")
    max_tokens = fields.integer("max_tokens", 0 if echo else 1, INT32_MAX)
    if max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    logprobs = fields.integer("logprobs", 0, INT32_MAX)
    prompt_logprobs = fields.integer("prompt_logprobs", 0, INT32_MAX)
    sampling = _sampling(
        fields,
        max_tokens=max(1, max_tokens),
        logprobs=logprobs,
        prompt_logprobs=_widest(prompt_logprobs, logprobs if echo else None),
    )
    options = _options(fields, sampling, add_special_tokens=True, prompt_logprobs=prompt_logprobs is not None)
    prompts = _prompts(fields)
    if len(prompts) * options.n > MAX_SEQUENCES:
        raise invalid(
            f"{len(prompts)} prompts with n {options.n} are {len(prompts) * options.n} sequences; one call may ask for "
            f"{MAX_SEQUENCES}",
            "prompt",
        )
    return CompletionBody(options, prompts, echo, logprobs is not None, generate=max_tokens > 0)


def parse_chat(body: Json) -> ChatBody:
    """`/v1/chat/completions`; raises ApiError (INVALID_ARGUMENT) naming the first field that can't be served."""
    fields = Fields(body)
    _refuse_unserved(fields)
    if fields.flag("echo"):
        raise invalid("echo can't be served for chats; use /v1/completions", "echo")
    logprobs = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, INT32_MAX)
    if top and not logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    prompt_logprobs = fields.integer("prompt_logprobs", 0, INT32_MAX)
    max_tokens = fields.integer("max_tokens", 1, INT32_MAX)  # the older name; the newer one wins
    max_completion_tokens = fields.integer("max_completion_tokens", 1, INT32_MAX)
    sampling = _sampling(
        fields,
        max_tokens=max_tokens if max_completion_tokens is None else max_completion_tokens,
        logprobs=(top or 0) if logprobs else None,
        prompt_logprobs=prompt_logprobs,
    )
    options = _options(fields, sampling, add_special_tokens=False, prompt_logprobs=prompt_logprobs is not None)
    tools = asked_tools(fields)
    if tools is None:
        return ChatBody(options, _chat(fields), logprobs)
    if options.grammar is not None:
        raise invalid(f"{options.grammar.field} can't be combined with tools: a call is no such text", "tools")
    chat = dataclasses.replace(_chat(fields), tools=tools.offered)
    return ChatBody(dataclasses.replace(options, grammar=tools.grammar), chat, logprobs, tools)


def parse_tokenize(body: Json) -> TokenizeBody:
    fields = Fields(body)
    text = fields.text("prompt")
    if (text is None) == (fields.raw("messages") is None):
        raise invalid("exactly one of prompt (a string) and messages is needed", "prompt")
    return TokenizeBody(
        fields.text("model"),
        _chat(fields) if text is None else text,
        fields.flag("add_special_tokens", default=text is not None),
        fields.flag("return_token_strs"),
    )


def parse_detokenize(body: Json) -> DetokenizeBody:
    fields = Fields(body)
    if fields.raw("tokens") is None:
        raise invalid("tokens is missing; it must be a list of token ids", "tokens")
    return DetokenizeBody(fields.text("model"), list(fields.integers("tokens", MAX_PROMPT_IDS)))


def _refuse_unserved(fields: Fields) -> None:
    for name in _REFUSED:
        value = fields.raw(name)
        if value is not None and value is not False and value not in ("", []):
            raise invalid(f"{name} can't be served by this server; leave it out", name)


def _widest(first: int | None, second: int | None) -> int | None:
    present = [value for value in (first, second) if value is not None]
    return max(present) if present else None


def _sampling(fields: Fields, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> Sampling:
    n = fields.integer("n", 1, MAX_N)
    best_of = fields.integer("best_of", 1, MAX_N)
    if best_of is not None and best_of != (n or 1):
        raise invalid(f"best_of is {best_of}; it can only be served equal to n ({n or 1})", "best_of")
    return Sampling(
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        top_k=fields.integer("top_k", -1, INT32_MAX),
        min_p=fields.number("min_p"),
        seed=fields.integer("seed", 0, UINT64_MAX),
        repetition_penalty=fields.number("repetition_penalty"),
        presence_penalty=fields.number("presence_penalty"),
        frequency_penalty=fields.number("frequency_penalty"),
        logit_bias=_logit_bias(fields),
        max_tokens=max_tokens,
        min_tokens=fields.integer("min_tokens", 0, INT32_MAX),
        stop_token_ids=fields.integers("stop_token_ids", MAX_STOP_IDS),
        ignore_eos=fields.boolean("ignore_eos"),
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _options(fields: Fields, sampling: Sampling, *, add_special_tokens: bool, prompt_logprobs: bool) -> Options:
    stream = fields.flag("stream")
    stream_options = fields.object("stream_options")
    if stream_options is not None and not stream:
        raise invalid("stream_options needs stream to be true", "stream_options")
    reporting = Fields(stream_options or {}, "stream_options")
    salt = fields.text("cache_salt", MAX_SALT_BYTES)
    if salt == "":
        raise invalid("cache_salt is empty; leave it out or send a secret of the tenant", "cache_salt")
    fields.text("user")
    fields.object("metadata")
    if stream and prompt_logprobs:
        raise invalid("prompt_logprobs can't be streamed; set stream to false", "prompt_logprobs")
    return Options(
        model=fields.text("model"),
        sampling=sampling,
        stop=_stop(fields),
        include_stop=fields.flag("include_stop_str_in_output"),
        skip_special_tokens=fields.flag("skip_special_tokens", default=True),
        add_special_tokens=fields.flag("add_special_tokens", default=add_special_tokens),
        priority=fields.integer("priority", -INT32_MAX - 1, INT32_MAX) or 0,
        cache_salt=salt,
        stream=stream,
        include_usage=reporting.flag("include_usage"),
        continuous_usage=reporting.flag("continuous_usage_stats"),
        return_token_ids=fields.flag("return_token_ids"),
        prompt_logprobs=prompt_logprobs,
        grammar=asked_grammar(fields),
    )


def _stop(fields: Fields) -> tuple[str, ...]:
    """Stop strings; `generate` checks how many and how long they are."""
    value = fields.raw("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise fields.wrong("stop", "a string or a list of strings")
    strings: list[str] = []
    for item in value:
        if not isinstance(item, str):
            raise invalid(f"stop must hold strings, not {kind(item)}", "stop")
        strings.append(item)
    return tuple(strings)


def _logit_bias(fields: Fields) -> dict[int, float]:
    values = fields.object("logit_bias") or {}
    if len(values) > MAX_BIASES:
        raise invalid(f"logit_bias has {len(values)} entries; at most {MAX_BIASES} are allowed", "logit_bias")
    biases: dict[int, float] = {}
    for key, value in values.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= INT32_MAX):
            raise invalid("logit_bias has a key that is no token id; keys are ids in decimal digits", "logit_bias")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid(f"logit_bias of id {key} must be a number, not {kind(value)}", "logit_bias")
        if not -100 <= value <= 100:
            raise invalid(f"logit_bias of id {key} is out of range; it must be from -100 to 100", "logit_bias")
        biases[int(key)] = float(value)
    return biases


def _prompts(fields: Fields) -> list[str] | list[PromptIds]:
    """The prompts of a completion: one text, texts, one list of ids or lists of ids."""
    value = fields.raw("prompt")
    if value is None:
        raise invalid("prompt is missing; it must be a string, a list of strings, token ids or lists of them", "prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise fields.wrong("prompt", "a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise invalid("prompt is an empty list; send at least one prompt", "prompt")
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise invalid(f"prompt has {len(value)} prompts; at most {MAX_PROMPTS} are allowed in one call", "prompt")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) for item in value):
        return [_ids(item, f"prompt[{i}]") for i, item in enumerate(value)]
    raise invalid("prompt must hold strings only, token ids only or lists of token ids only", "prompt")


def _ids(values: list[object], where: str) -> PromptIds:
    if len(values) > MAX_PROMPT_IDS:
        raise invalid(f"{where} has {len(values)} token ids; at most {MAX_PROMPT_IDS} are allowed", "prompt")
    if set(map(type, values)) - {int}:  # exact types: True is an int too
        other = next(value for value in values if type(value) is not int)
        raise invalid(f"{where} must hold token ids only, not {kind(other)}", "prompt")
    ids = cast(PromptIds, values)
    if ids and not (min(ids) >= 0 and max(ids) <= INT32_MAX):
        raise invalid(f"{where} holds a token id outside 0 to {INT32_MAX}", "prompt")
    return ids


def _chat(fields: Fields) -> ChatPrompt:
    entries = fields.items("messages", MAX_MESSAGES)
    if not entries:
        raise invalid("messages is missing or empty; send at least one message", "messages")
    continues = fields.flag("continue_final_message")
    generates = fields.boolean("add_generation_prompt")
    if continues and generates:
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    return ChatPrompt(
        [_message(entry, f"messages[{i}]") for i, entry in enumerate(entries)],
        add_generation_prompt=not continues if generates is None else generates,
        continue_final_message=continues,
        template_kwargs=fields.object("chat_template_kwargs") or {},
    )


def _message(entry: object, where: str) -> dict[str, object]:
    """One message with the keys that templates read; anything else a client put into it is dropped."""
    if not isinstance(entry, dict):
        raise invalid(f"{where} must be an object, not {kind(entry)}", where)
    fields = Fields(entry, where)
    role = fields.text("role")
    if not role:
        raise invalid(f"{where}.role is missing", f"{where}.role")
    for name in ("function_call", "audio"):
        if fields.raw(name):
            raise invalid(f"{where}.{name} can't be served by this server", f"{where}.{name}")
    calls = past_calls(fields)
    message: dict[str, object] = {"role": role, "content": _content(fields, needed=not calls)}
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "reasoning_content", "tool_call_id"):
        value = fields.text(name)
        if value is not None:
            message[name] = value
    return message


def _content(fields: Fields, *, needed: bool) -> str:
    """A message's text; parts are joined by a newline."""
    value = fields.raw("content")
    if value is None:
        if not needed:
            return ""
        raise invalid(f"{fields.path('content')} is missing", fields.path("content"))
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong("content", "a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(fields.items("content", MAX_PARTS) or []):
        where = f"{fields.path('content')}[{i}]"
        if not isinstance(part, dict):
            raise invalid(f"{where} must be an object, not {kind(part)}", where)
        reader = Fields(part, where)
        if reader.text("type") != "text":
            raise invalid(f"{where}.type: only parts of type text can be served, no images, audio or files", where)
        text = reader.text("text")
        if text is None:
            raise invalid(f"{where}.text is missing", f"{where}.text")
        texts.append(text)
    return "\n".join(texts)
