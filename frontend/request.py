"""A text request and its answer as plain data: what `generate.py` takes and yields, whatever the edge speaks.

Owns the types that the HTTP API, the text gRPC service and the CLI share. Knows no wire format; ranges of sampling
values are the engine core's to check (its refusal comes back as an `ApiError` naming the parameter).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256


class Code(enum.IntEnum):
    """google.rpc.Code values, from which each edge derives its own status (HTTP 400, 429, 503 …)."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class ApiError(Exception):
    """A request that failed or was refused; `parameter` names the field to blame, where there is one.

    `reason` is for programs: what happened within the code, in capitals, e.g. QUEUE_FULL.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        parameter: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.parameter = parameter
        self.retry_after_s = retry_after_s
        self.reason = reason or code.name


DRAIN_RETRY_S = 5.0


def shutting_down() -> ApiError:
    """The refusal of what comes while a server drains."""
    return ApiError(Code.UNAVAILABLE, "the server is shutting down", retry_after_s=DRAIN_RETRY_S)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling fields as the client sent them; None is absent. Meaning: engine.proto's SamplingParams."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must follow; `kind` is a field of engine.proto's Grammar."""

    kind: str
    text: str
    field: str = "grammar"
    """The client's own name for it, to which an error belongs."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a prompt is rendered from by the model's chat template."""

    messages: list[dict[str, object]]
    """Each with `role` and `content`, both strings."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer goes on with the last message instead of starting a new one."""
    tools: list[dict[str, object]] = field(default_factory=list)
    """That the template offers."""
    template_kwargs: dict[str, object] = field(default_factory=dict)
    """The client's own values for the template, such as `enable_thinking`."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One prompt, as ids (the edge tokenizes text and renders chats first), and how to answer it."""

    prompt_ids: list[int]
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    """Stop strings: they end a sequence wherever tokens break and are not part of its text."""
    include_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    deadline_s: float | None = None
    """Seconds from now."""
    label: str = ""
    trace_parent: str | None = None
    """W3C traceparent of the span that it belongs to."""
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class TopLogprob:
    id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its raw-distribution logprob; `logprob` is None for a prompt's first token only."""

    id: int
    token: str
    logprob: float | None
    rank: int | None
    top: tuple[TopLogprob, ...] = ()


@dataclass(slots=True)
class Delta:
    """New text of one of the n sequences. The last delta of a sequence has a finish_reason."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    """`stop` or `length`."""
    stop_reason: str | int | None = None
    """The stop string or stop id that ended the sequence; None for eos."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
