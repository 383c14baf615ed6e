"""Between a text request and the engine core's protobuf messages: field by field, column by column.

Owns the conversions and the checks that must precede them (what doesn't fit its wire type, what would be allocated from
an unchecked number). Ranges of sampling values are the engine core's to check. Does no I/O.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from greenlane.engine.v1 import engine_pb2 as pb

from frontend.request import ApiError, Code, Sampling, TextRequest

MAX_N = 128
MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SALT_BYTES = 256
MAX_LABEL_BYTES = 256
MAX_GRAMMAR_BYTES = 128 << 10
HASH_BYTES = 32
SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "n",
    "logprobs",
    "prompt_logprobs",
)


class ProtocolViolation(Exception):
    """The engine core sent what the contract doesn't allow; its session can't go on."""


# ------------------------------ requests


def build_add(request: TextRequest, page_size: int, max_bytes: int) -> pb.AddRequest:
    """The request without its number; linear in the prompt, about 0.1 µs a token, most of it hashing.

    Raises ApiError (INVALID_ARGUMENT) naming the field for what has no place in the message, and for a prompt that
    doesn't fit into one message of `max_bytes`.
    """
    add = pb.AddRequest(prompt_ids=pack_ids(request.prompt_ids, "prompt"), sampling=_sampling(request.sampling))
    if request.cache_salt is not None:
        add.cache_salt = _text("cache_salt", request.cache_salt, MAX_SALT_BYTES)
    if request.label:
        add.label = _text("request_id", request.label, MAX_LABEL_BYTES)
    if request.trace_parent is not None:
        add.trace_parent = request.trace_parent
    if request.grammar is not None:
        text = _text(request.grammar.field, request.grammar.text, MAX_GRAMMAR_BYTES)
        add.grammar.CopyFrom(pb.Grammar(**{request.grammar.kind: text}))
    _assign(add, "priority", request.priority)
    _assign(add, "deadline_s", request.deadline_s)
    if add.ByteSize() <= max_bytes:
        add.prefix_hashes = prefix_chain(add.prompt_ids, page_size, request.cache_salt)
        if add.ByteSize() > max_bytes:  # the core computes the chain itself
            add.ClearField("prefix_hashes")
    if add.ByteSize() > max_bytes:
        raise ApiError(
            Code.INVALID_ARGUMENT,
            f"the prompt of {len(request.prompt_ids)} tokens is beyond what one request can carry "
            f"({max_bytes // 4} tokens)",
            "prompt",
        )
    return add


def pack_ids(ids: list[int], name: str) -> bytes:
    """Token ids as little-endian int32. Raises ApiError naming the field for anything else."""
    try:
        packed = array("i", ids)
    except (OverflowError, TypeError):
        raise ApiError(Code.INVALID_ARGUMENT, f"{name} must hold token ids, 0 to 2^31 - 1", name) from None
    return np.frombuffer(packed, np.int32).astype("<i4", copy=False).tobytes()


def prefix_chain(packed_ids: bytes, page_size: int, salt: str | None) -> bytes:
    """SHA-256 chain over the full pages of packed ids, 32 bytes a page, as engine.proto defines it."""
    tag = b"greenlane.prefix.v1" + (b"\x00" if salt is None else b"\x01" + salt.encode())
    sha256 = hashlib.sha256
    parent = sha256(tag).digest()
    width = 4 * page_size
    chain: list[bytes] = []
    for start in range(0, len(packed_ids) - width + 1, width):
        parent = sha256(parent + packed_ids[start : start + width]).digest()
        chain.append(parent)
    return b"".join(chain)


def _sampling(sampling: Sampling) -> pb.SamplingParams:
    if sampling.n is not None and not 1 <= sampling.n <= MAX_N:  # numbers and streams are allocated from it
        raise ApiError(Code.INVALID_ARGUMENT, f"n is {sampling.n}; it must be from 1 to {MAX_N}", "n")
    params = pb.SamplingParams()
    for name in SCALARS:
        _assign(params, name, getattr(sampling, name))
    cap("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_IDS)
    cap("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS)
    try:
        params.stop_token_ids.extend(sampling.stop_token_ids)
    except (ValueError, TypeError):
        raise ApiError(Code.INVALID_ARGUMENT, "stop_token_ids must hold token ids", "stop_token_ids") from None
    try:
        params.logit_bias.update(sampling.logit_bias)
    except (ValueError, TypeError):
        raise ApiError(Code.INVALID_ARGUMENT, "logit_bias must map token ids to numbers", "logit_bias") from None
    return params


def _assign(message: pb.SamplingParams | pb.AddRequest, name: str, value: float | None) -> None:
    """Set a scalar field; None leaves it absent."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (ValueError, TypeError, OverflowError):
        raise ApiError(Code.INVALID_ARGUMENT, f"{name} is {value!r}, which is out of range", name) from None


def cap(name: str, count: int, limit: int) -> None:
    """Raise ApiError (INVALID_ARGUMENT) for a list of too many entries: asked before it is copied."""
    if count > limit:
        raise ApiError(Code.INVALID_ARGUMENT, f"{name} has {count} entries; at most {limit} are allowed", name)


def _text(name: str, value: str, limit: int) -> str:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ApiError(Code.INVALID_ARGUMENT, f"{name} is no valid Unicode", name) from None
    if size > limit:
        raise ApiError(Code.INVALID_ARGUMENT, f"{name} has {size} bytes; at most {limit} are allowed", name)
    return value


# ------------------------------ outputs


def column(name: str, data: bytes, dtype: str) -> npt.NDArray[np.generic]:
    """A packed column as an array (no copy). Raises ProtocolViolation for a ragged one."""
    try:
        return np.frombuffer(data, dtype)
    except ValueError:
        raise ProtocolViolation(f"the column {name} has {len(data)} bytes, no whole number of items") from None


@dataclass(frozen=True, slots=True)
class RawLogprob:
    """A token's raw-distribution logprob and its alternatives, most likely first, as ids."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def logprob_rows(columns: pb.LogprobColumns, rows: int) -> Iterator[tuple[int, RawLogprob]]:
    """(index into the tokens, logprob) of each row. Raises ProtocolViolation if the columns don't fit `rows` tokens."""
    index = column("logprobs.rows", columns.rows, "<u4")
    sampled = column("logprobs.sampled", columns.sampled, "<f4")
    ranks = column("logprobs.ranks", columns.ranks, "<i4")
    counts = column("logprobs.counts", columns.counts, "<u4")
    ids = column("logprobs.top_ids", columns.top_ids, "<i4").tolist()
    values = column("logprobs.top_logprobs", columns.top_logprobs, "<f4").tolist()
    if not len(index) == len(sampled) == len(ranks) == len(counts) or not len(ids) == len(values) == counts.sum():
        raise ProtocolViolation("the columns of logprobs differ in length")
    if len(index) and int(index.max()) >= rows:
        raise ProtocolViolation(f"logprobs describe a token beyond the {rows} sent")
    end = 0
    for row, logprob, rank, count in zip(
        index.tolist(), sampled.tolist(), ranks.tolist(), counts.tolist(), strict=True
    ):
        start, end = end, end + count
        yield row, RawLogprob(logprob, rank, tuple(zip(ids[start:end], values[start:end], strict=True)))


def prompt_rows(stretch: pb.PromptLogprobs) -> list[RawLogprob]:
    """The tokens that a stretch describes. Raises ProtocolViolation if its columns differ in length."""
    logprobs = column("prompt_logprobs.logprobs", stretch.logprobs, "<f4").tolist()
    ranks = column("prompt_logprobs.ranks", stretch.ranks, "<i4").tolist()
    ids = column("prompt_logprobs.top_ids", stretch.top_ids, "<i4").tolist()
    values = column("prompt_logprobs.top_logprobs", stretch.top_logprobs, "<f4").tolist()
    top = stretch.top
    if len(ranks) != len(logprobs) or not len(ids) == len(values) == top * len(logprobs):
        raise ProtocolViolation("the columns of prompt_logprobs differ in length")
    alternatives = list(zip(ids, values, strict=True))
    return [
        RawLogprob(logprob, rank, tuple(alternatives[row * top : (row + 1) * top]))
        for row, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True))
    ]


def api_error(error: pb.Error) -> ApiError:
    """What the engine core says of a request as the error of its client."""
    try:
        code = Code(error.code)
    except ValueError:
        code = Code.INTERNAL
    return ApiError(
        code,
        error.message or "the engine core gave no reason",
        error.parameter if error.HasField("parameter") else None,
        error.retry_after_s if error.HasField("retry_after_s") else None,
        _reason(error.reject_reason) if error.HasField("reject_reason") else None,
    )


def _reason(number: int) -> str | None:
    """A refusal's name for programs; None for one that this frontend doesn't know yet."""
    if number not in pb.RejectReason.values():
        return None
    return pb.RejectReason.Name(number).removeprefix("REJECT_REASON_")
