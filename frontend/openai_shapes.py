"""The shapes of OpenAI answers as plain dictionaries: usage, logprobs in their three spellings, choices.

Owns the field names that both the streamed and the whole answers use. Encodes nothing and knows no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from frontend.openai_fields import Json
from frontend.request import Delta, TokenLogprob, Usage

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; a token that can't be drawn gets this."""


@dataclass(slots=True)
class Collected:
    """One sequence's answer as far as it has arrived."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


def usage_shape(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def total_usage(usages: Iterable[Usage], generate: bool = True) -> Json:
    """The usage of a call over all its prompts; with `generate` False the one token drawn and dropped isn't told."""
    listed = list(usages)
    return usage_shape(
        sum(usage.prompt_tokens for usage in listed),
        sum(usage.completion_tokens for usage in listed) if generate else 0,
        sum(usage.cached_tokens for usage in listed),
    )


# ------------------------------ logprobs


def completion_logprobs(entries: Sequence[TokenLogprob], offset: int) -> Json:
    """The columns of `/v1/completions`; `offset`: where the first token starts in the choice's text (characters)."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in entries:
        tokens.append(entry.token)
        offsets.append(offset)
        offset += len(entry.token)
        if entry.logprob is None:
            logprobs.append(None)
            tops.append(None)
            continue
        logprobs.append(_finite(entry.logprob))
        tops.append({entry.token: _finite(entry.logprob)} | {top.token: _finite(top.logprob) for top in entry.top})
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}


def chat_logprobs(entries: Sequence[TokenLogprob], token_bytes: Callable[[int], bytes]) -> Json:
    """The list of `/v1/chat/completions`; `bytes` are the token's own, also where it is half a character."""
    return {
        "content": [
            {
                "token": entry.token,
                "logprob": _finite(entry.logprob or 0.0),
                "bytes": list(token_bytes(entry.id)),
                "top_logprobs": [
                    {"token": top.token, "logprob": _finite(top.logprob), "bytes": list(token_bytes(top.id))}
                    for top in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(entries: Sequence[TokenLogprob]) -> list[Json | None]:
    """vLLM's spelling of a prompt's logprobs: one object a token, by token id; None for the first token."""
    described: list[Json | None] = []
    for entry in entries:
        if entry.logprob is None:
            described.append(None)
            continue
        shape: Json = {
            str(top.id): {"logprob": _finite(top.logprob), "rank": rank, "decoded_token": top.token}
            for rank, top in enumerate(entry.top, 1)
        }
        shape[str(entry.id)] = {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.token,
        }
        described.append(shape)
    return described


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
