"""A request as plain data, from the wire to the scheduler, and what each sampling parameter means.

Owns the validation of everything a client may say (`resolve`), the defaults, and the commands and outputs that cross
between the gRPC thread and the engine thread. Holds no scheduling state: that is `scheduler.py`'s.

What combinations mean, written once:
  * `temperature` 0 is greedy; top_p, top_k and min_p are then without effect.
  * A sequence ends with the first of: a stop id, an eos id (unless `ignore_eos`), `max_tokens`, a full context. Stop
    ids win over `ignore_eos`: an id in `stop_token_ids` ends the sequence even if it is also an eos id.
  * Before `min_tokens` output tokens, stop ids and eos ids can't be drawn at all. With `ignore_eos` eos ids can.
  * Penalties look at prompt and output (repetition) or output alone (presence, frequency).
  * Logprobs describe the raw distribution: no parameter above changes them.
  * With a grammar, eos ends the sequence even with `ignore_eos`, and `min_tokens` is refused: at the grammar's end
    nothing else can be drawn.
  * `n` sequences of one request draw with seeds derived from the request's seed; sequence 0 uses the seed itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine_core.errors import Rejected, RejectReason, StatusCode

MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_N = 128
MAX_LOGPROBS = 20
MAX_SALT_BYTES = 256
MAX_LABEL_BYTES = 256
PREFIX_HASH_BYTES = 32
MAX_GRAMMAR_BYTES = 128 << 10
"""Bounds how deep what compiles it can recurse, too."""

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What an absent field means for the model served (generation_config.json)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against without looking at engine state."""

    vocab_size: int
    max_model_len: int
    page_size: int
    total_pages: int
    eos_token_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = SamplingDefaults()
    no_grammars: str | None = None
    """Why grammars can't be served, if they can't."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must follow, as text that only the worker reads."""

    kind: str
    """json_schema, regex, lark, choice or structural_tag, as in engine.proto."""
    text: str


@dataclass(frozen=True, slots=True)
class RawSampling:
    """Sampling fields as a client sent them; None is absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated and complete; see the module's text for the meaning of combinations."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    n: int
    logprobs: int
    """-1: none."""
    prompt_logprobs: int
    """-1: none."""


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request on its way to the engine thread: `params.n` sequences of one prompt."""

    session: int
    number: int
    """The first of `params.n` consecutive sequence numbers of the session."""
    ids: Ids
    hashes: bytes
    """Prefix hash chain, 32 bytes for each full page of `ids` (see engine.proto)."""
    salt: bytes | None
    params: SamplingParams
    priority: int = 0
    deadline: float | None = None
    """Clock time (seconds) after which the request fails with DEADLINE_EXCEEDED."""
    label: str = ""
    grammar: Grammar | None = None


# ------------------------------ commands to the engine thread


@dataclass(frozen=True, slots=True)
class Abort:
    """End these sequences; unknown and finished numbers are ignored."""

    session: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The frontend is gone: abort all it has open and publish nothing more to it."""

    session: int


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Drop every unreferenced prefix-cache page."""


Command = Request | Abort | CloseSession | FlushCache


# ------------------------------ outputs of the engine thread


@dataclass(frozen=True, slots=True)
class FinishError:
    code: StatusCode
    message: str
    reject_reason: RejectReason | None = None
    parameter: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """A sequence's last word. `reason` is the value of greenlane.engine.v1.FinishReason."""

    number: int
    reason: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    stop_token_id: int | None = None
    error: FinishError | None = None


FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_REJECTED, FINISH_ERROR = 1, 2, 3, 4, 5


@dataclass(slots=True)
class LogprobColumns:
    """Logprobs of some rows of an `Output`; columns as in greenlane.engine.v1.LogprobColumns."""

    rows: npt.NDArray[np.uint32]
    sampled: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


@dataclass(slots=True)
class PromptLogprobs:
    number: int
    start: int
    logprobs: bytes
    ranks: bytes
    top: int
    top_ids: bytes
    top_logprobs: bytes


@dataclass(slots=True)
class Output:
    """What happened to one session's sequences in one engine step; becomes part of a StepOutput."""

    session: int
    step: int
    accepted: list[int] = field(default_factory=list)
    started: list[tuple[int, int]] = field(default_factory=list)
    """(sequence number, cached prompt tokens)."""
    numbers: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    tokens: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: LogprobColumns | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)


# ------------------------------ validation


def _range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> float:
    """The value, if it is a finite number within [low, high] (or (low, high])."""
    if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise Rejected(
            RejectReason.PARAMETER_OUT_OF_RANGE, f"{name} is {value!r}; it must be in {bracket}{low:g}, {high:g}]", name
        )
    return value


def _count(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise Rejected(RejectReason.PARAMETER_OUT_OF_RANGE, f"{name} is {value}; it must be from {low} to {high}", name)
    return value


def _ids_in_vocabulary(name: str, ids: list[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise Rejected(
                RejectReason.TOKEN_OUT_OF_VOCABULARY,
                f"{name} holds id {token}; the vocabulary has ids 0 to {vocab_size - 1}",
                name,
            )


def check_prompt(ids: Ids, limits: ModelLimits) -> None:
    """Raise Rejected for an empty prompt, an id outside the vocabulary or a prompt that leaves no room for a token."""
    if len(ids) == 0:
        raise Rejected(RejectReason.EMPTY_PROMPT, "the prompt is empty; send at least one token", "prompt")
    if int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size:
        bad = int(ids[(ids < 0) | (ids >= limits.vocab_size)][0])
        raise Rejected(
            RejectReason.TOKEN_OUT_OF_VOCABULARY,
            f"the prompt holds id {bad}; the vocabulary has ids 0 to {limits.vocab_size - 1}",
            "prompt",
        )
    if len(ids) >= limits.max_model_len:
        raise Rejected(
            RejectReason.CONTEXT_EXCEEDED,
            f"the prompt has {len(ids)} tokens; with one output token it must fit into the context of "
            f"{limits.max_model_len} (prompt + max_tokens <= max_model_len)",
            "prompt",
        )


def resolve(raw: RawSampling, prompt_len: int, limits: ModelLimits, drawn_seed: int) -> SamplingParams:
    """Check every field against its range and fill in the defaults; raises Rejected naming the first bad field.

    `drawn_seed` (uint64) is used where the client gave none. prompt + max_tokens beyond the context is refused, not
    cut.
    """
    defaults = limits.defaults
    max_tokens, min_tokens = _output_length(raw, prompt_len, limits)
    top_k = defaults.top_k if raw.top_k is None else _count("top_k", raw.top_k, -1, 2**31 - 1)
    _check_stop_ids(raw.stop_token_ids, limits.vocab_size)

    def real(
        name: str, value: float | None, default: float, bounds: tuple[float, float], *, above: bool = False
    ) -> float:
        return default if value is None else _range(name, value, *bounds, open_low=above)

    def top(name: str, value: int | None) -> int:
        return -1 if value is None else _count(name, value, 0, MAX_LOGPROBS)

    return SamplingParams(
        temperature=real("temperature", raw.temperature, defaults.temperature, (0.0, 100.0)),
        top_p=real("top_p", raw.top_p, defaults.top_p, (0.0, 1.0), above=True),
        top_k=0 if top_k in (-1, 0) or top_k >= limits.vocab_size else top_k,
        min_p=real("min_p", raw.min_p, defaults.min_p, (0.0, 1.0)),
        seed=drawn_seed if raw.seed is None else _count("seed", raw.seed, 0, 2**64 - 1),
        repetition_penalty=real(
            "repetition_penalty", raw.repetition_penalty, defaults.repetition_penalty, (0.0, 100.0), above=True
        ),
        presence_penalty=real("presence_penalty", raw.presence_penalty, 0.0, (-2.0, 2.0)),
        frequency_penalty=real("frequency_penalty", raw.frequency_penalty, 0.0, (-2.0, 2.0)),
        logit_bias=_checked_bias(raw.logit_bias, limits.vocab_size),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=frozenset(raw.stop_token_ids),
        ignore_eos=bool(raw.ignore_eos),
        n=1 if raw.n is None else _count("n", raw.n, 1, MAX_N),
        logprobs=top("logprobs", raw.logprobs),
        prompt_logprobs=top("prompt_logprobs", raw.prompt_logprobs),
    )


def _output_length(raw: RawSampling, prompt_len: int, limits: ModelLimits) -> tuple[int, int]:
    """(max_tokens, min_tokens), which fit behind the prompt."""
    room = limits.max_model_len - prompt_len
    max_tokens = room if raw.max_tokens is None else _count("max_tokens", raw.max_tokens, 1, 2**31 - 1)
    if max_tokens > room:
        raise Rejected(
            RejectReason.CONTEXT_EXCEEDED,
            f"prompt ({prompt_len} tokens) + max_tokens ({max_tokens}) is {prompt_len + max_tokens}; the context holds "
            f"{limits.max_model_len} (prompt + max_tokens <= max_model_len): shorten the prompt or lower max_tokens",
            "max_tokens",
        )
    min_tokens = 0 if raw.min_tokens is None else raw.min_tokens
    if not 0 <= min_tokens <= max_tokens:
        raise Rejected(
            RejectReason.PARAMETER_OUT_OF_RANGE,
            f"min_tokens is {min_tokens}; it must be from 0 to max_tokens ({max_tokens})",
            "min_tokens",
        )
    return max_tokens, min_tokens


def _check_stop_ids(ids: tuple[int, ...], vocab_size: int) -> None:
    _check_entries("stop_token_ids", len(ids), MAX_STOP_IDS)
    _ids_in_vocabulary("stop_token_ids", list(ids), vocab_size)


def _checked_bias(bias: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    _check_entries("logit_bias", len(bias), MAX_LOGIT_BIAS)
    _ids_in_vocabulary("logit_bias", list(bias), vocab_size)
    return {token: _range("logit_bias", value, -100.0, 100.0) for token, value in bias.items()}


def _check_entries(name: str, count: int, most: int) -> None:
    if count > most:
        raise Rejected(
            RejectReason.PARAMETER_OUT_OF_RANGE, f"{name} has {count} entries; at most {most} are allowed", name
        )


def sequence_seed(seed: int, index: int) -> int:
    """The seed (uint64) of sequence `index` of a request; sequence 0 draws with the request's own."""
    if index == 0:
        return seed
    digest = hashlib.sha256(b"greenlane.seed.v1" + seed.to_bytes(8, "little") + index.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little")


def prefix_root(salt: bytes | None) -> bytes:
    """The parent (32 bytes) of a chain's first page: one value a salt, another without any."""
    return hashlib.sha256(b"greenlane.prefix.v1\x00" if salt is None else b"greenlane.prefix.v1\x01" + salt).digest()


def prefix_next(parent: bytes, page_ids: bytes) -> bytes:
    """The chain's next link (32 bytes) over one full page of int32 LE ids."""
    return hashlib.sha256(parent + page_ids).digest()


def prefix_chain(ids: Ids, page_size: int, salt: bytes | None) -> bytes:
    """SHA-256 chain over the full pages of `ids`, 32 bytes a page, as engine.proto defines it."""
    parent = prefix_root(salt)
    data = ids.astype("<i4", copy=False).tobytes()
    width = 4 * page_size
    chain: list[bytes] = []
    for start in range(0, len(data) - width + 1, width):
        parent = prefix_next(parent, data[start : start + width])
        chain.append(parent)
    return b"".join(chain)
