"""One engine iteration as data: a `StepPlan` out, a `StepResult` back.

Owns the structures that cross the ZMQ hop between engine and workers. They are msgspec structs encoded as arrays.
Columns are packed little-endian bytes, so that encoding costs the same whatever the batch. Plans are *diffs* against
tables that the worker keeps by slot: a row's ids, pages and sampling parameters are sent once, then only new pages.
"""

from __future__ import annotations

import enum

import msgspec

WIRE_VERSION = 5
"""Of everything in this file and in `executor/channel.py`; both ends refuse any other."""
MAX_CHUNKS = 32
"""Chunks of one plan: what a worker plans attention for, whose host cost grows with it."""


MOST_PRIMARY_TOKENS = 2048
"""Of chunks on the primary lane where the policy chooses lanes: a GPU's pace hardly grows beyond, and rows wait."""


class RowSampling(msgspec.Struct, array_like=True, frozen=True):
    """How the worker draws a row's tokens. Values are validated and resolved: no field means "default" here.

    The order is: raw logits (logprobs are taken here) → suppress → logit_bias → penalties → temperature →
    grammar's mask → top_k → top_p → min_p → draw. `temperature == 0` takes the arg max after bias, penalties and mask.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int = 0
    """uint64. The draw at position p (index in prompt + output of the token being drawn) depends on (seed, p) alone."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    suppress: bytes = b""
    """int32 LE ids that can't be drawn while the row has fewer than `min_tokens` output tokens (eos and stop ids)."""
    min_tokens: int = 0
    logprobs: int = -1
    """Top alternatives per sampled token, -1: no logprobs."""
    prompt_logprobs: int = -1


class RowStart(msgspec.Struct, array_like=True, frozen=True):
    """A row enters `slot`; whatever the slot's tables held before is void."""

    slot: int
    prompt_len: int
    """ids[:prompt_len] are the prompt; later ids were generated before a preemption and count as output."""
    ids: bytes
    """int32 LE: every token known so far. Chunks of this step and later ones refer to it by position."""
    cached: int
    """Tokens whose KV is already in `pages`; the first chunk starts here."""
    pages: bytes
    """int32 LE page ids in order of position; more come by `StepPlan.page_slots` / `page_ids`."""
    sampling: RowSampling
    grammar: int = 0
    """Key of the prepared grammar that the row's output follows; 0: none."""


class PrefillChunk(msgspec.Struct, array_like=True, frozen=True):
    """Positions start .. start+length-1 of a row's known ids, to be computed in this step."""

    slot: int
    start: int
    length: int
    last: bool
    """The row samples its next token after this chunk."""


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """What the workers do in one step.

    Order of effects: `starts`, then pages are appended (`page_ids[i]` to `page_slots[i]`), then one forward over the
    decode rows and the chunks. A decode row feeds the token it sampled last (taken on the device) at its current
    length, which then grows by one. A row that doesn't appear keeps its tables.

    A plan without rows and chunks asks for the prefill batch in flight: its result comes when that batch is complete,
    or without the batch as soon as another plan has followed. It may be in flight beside `async_depth` others.
    """

    step: int
    """1, 2, 3 … without a gap."""
    starts: list[RowStart]
    page_slots: bytes
    """int32 LE."""
    page_ids: bytes
    """int32 LE."""
    decode_slots: bytes
    """int32 LE, each at most once."""
    chunks: list[PrefillChunk]
    """MAX_CHUNKS at most."""
    prefill_lane: bool = False
    """The chunks run on the prefill lane, beside decode; their results come with a later `StepResult`."""
    partition: int = 0
    """Which of the worker's partitions is in force while they do, if it has any."""


class LogprobBlock(msgspec.Struct, array_like=True, frozen=True):
    """Raw-distribution logprobs of some sampled rows (columns as in greenlane.engine.v1.LogprobColumns)."""

    rows: bytes
    """uint32 LE index into the tokens of the same result."""
    sampled: bytes
    ranks: bytes
    counts: bytes
    top_ids: bytes
    top_logprobs: bytes


class PromptLogprobBlock(msgspec.Struct, array_like=True, frozen=True):
    """Raw-distribution logprobs of one chunk's prompt tokens; `start` is the prompt index of the first one described.

    A chunk over positions a .. b-1 describes tokens a+1 .. b, as far as these are prompt tokens.
    """

    slot: int
    start: int
    logprobs: bytes
    ranks: bytes
    top: int
    top_ids: bytes
    top_logprobs: bytes


class PrefillResult(msgspec.Struct, array_like=True, frozen=True):
    """The chunks of plan `step` are proven complete; their KV may become visible now."""

    step: int
    tokens: bytes
    """int32 LE, one for each chunk with `last`, in plan order."""
    logprobs: LogprobBlock | None = None
    prompt_logprobs: list[PromptLogprobBlock] = []
    error: str | None = None
    """The chunks failed after quiescence was proven: the whole cause chain. `tokens` is empty then."""
    busy_us: int = 0
    """On the prefill lane, µs: from its launch until its completion was found. 0 for chunks that share a forward."""
    late: list[int] = []
    """Slots of rows that drew nothing behind their last chunk, as in `StepResult.late`: `tokens` has none for them, and
    their chunks count as one token shorter."""


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """Answer to plan `step`. Results come in plan order, one for each plan."""

    step: int
    tokens: bytes
    """int32 LE, one for each decode row in plan order but those in `late`."""
    logprobs: LogprobBlock | None
    prefills: list[PrefillResult]
    """Prefill batches proven complete since the previous result: this plan's own when they share its forward."""
    primary_complete: int
    """Lane proofs: every step up to this one is complete on the primary lane …"""
    prefill_complete: int
    """… and every prefill batch launched in a step up to this one is complete on the prefill lane."""
    error: str | None = None
    """The forward raised (out of memory, a Python error) and quiescence was proven: the whole cause chain. All rows
    of the step failed and `tokens` is empty. A batch on the prefill lane fails by its own `PrefillResult.error`."""
    busy_us: int = 0
    """What the step took, µs: from its launch, or the result before it if that came later, to its own completion."""
    refused: list[tuple[int, str]] = []
    """(slot, cause) of rows, also of reported prefills, whose grammar allows no token any more: it became too complex.
    Their tokens here mean nothing."""
    late: list[int] = []
    """Slots of decode rows that weren't in the forward, since what their grammars allow next wasn't known yet: they are
    where they were, save for pages appended. The worker says when they may be planned again (`CaughtUp`)."""


class GrammarPrepared(msgspec.Struct, array_like=True, frozen=True):
    """What came of preparing a grammar."""

    key: int
    error: str | None = None
    """Why there is none, for the client."""


class PartitionTimes(msgspec.Struct, array_like=True, frozen=True):
    """What forwards take while a partition is in force, µs."""

    decode: list[tuple[int, int]]
    """(rows, µs) on the decode partition, beside a prefill, ascending."""
    prefill: list[tuple[int, int]]
    """(tokens, µs) of a prefill on its own, beside decode, ascending."""
    reading: list[tuple[int, float]]
    """(rows, ns that decode attention takes there for each token of KV that it reads, beside a prefill), ascending: few
    rows keep fewer of its SMs busy."""


class StepTimes(msgspec.Struct, array_like=True, frozen=True):
    """What forwards take on this worker's device, µs, measured at start with rows that have next to no context."""

    decode: list[tuple[int, int]]
    """(rows, µs) on the whole GPU, ascending."""
    mixed: list[tuple[int, int, int]]
    """(decode rows, tokens of a chunk, µs) on the whole GPU, ascending; the largest rows cover all that can run."""
    partitions: list[PartitionTimes]
    context_ns: float
    """Of decode attention on the whole GPU, for each token of KV that it reads."""
    history: list[tuple[int, float]]
    """(tokens of a chunk, ns that its attention takes on the whole GPU for each token of KV before it), ascending."""


class Lane(enum.IntEnum):
    """An ordered queue of GPU work; a *sequence* on a lane is the number of the step that was submitted to it."""

    PRIMARY = 0
    PREFILL = 1
