"""One of a request's sequences: what the scheduler remembers about it while it is open.

Owns the states and their legal transitions, and what leaves for the worker when a row starts. Lengths that change with
every step live in `rows.py`, by slot.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from engine_core.cache.prefix import CachedPage
from engine_core.request import (
    PREFIX_HASH_BYTES,
    Finish,
    FinishError,
    Request,
    SamplingParams,
    prefix_next,
    prefix_root,
    sequence_seed,
)
from engine_core.step import RowSampling


class SequenceState(enum.IntEnum):
    WAITING = 0
    """In the queue: no slot, no page."""
    PREFILL = 1
    """Has a slot; ids whose KV isn't scheduled yet, or (on the prefill lane) not joined yet."""
    DECODE = 2
    PARKED = 3
    """Preempted with work in flight: pages given back, tokens still to come."""
    CLOSED = 4


_LEGAL = {
    SequenceState.WAITING: (SequenceState.PREFILL, SequenceState.CLOSED),
    SequenceState.PREFILL: (SequenceState.DECODE, SequenceState.PARKED, SequenceState.CLOSED),
    SequenceState.DECODE: (SequenceState.PARKED, SequenceState.CLOSED),
    SequenceState.PARKED: (SequenceState.WAITING, SequenceState.CLOSED),
    SequenceState.CLOSED: (),
}


class IllegalTransition(Exception):
    """A sequence was moved to a state that doesn't follow its own: a bug."""


@dataclass(slots=True, eq=False)
class Family:
    """What the sequences of one request share: the prompt, and who computes it first."""

    prompt: bytes
    """int32 LE."""
    computed: bool = False
    """The prompt's pages are published: siblings find them."""
    leader: Sequence | None = None
    """The sibling that computes the prompt while the others wait."""
    grammar: int = 0
    """Key of the grammar that they follow; 0: none."""


@dataclass(slots=True, eq=False)
class Sequence:
    """State that survives preemption. `order` is the rank among all: lower (priority, arrival) goes first."""

    serial: int
    """The engine's own id, by arrival; 1, 2, 3 …"""
    request: Request
    index: int
    family: Family
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    entered_with: int = 0
    """Ids known when it last got a row."""
    output: bytearray = field(default_factory=bytearray)
    """int32 LE: generated ids, as far as they have left the slot's table."""
    links: list[bytes] = field(default_factory=list)
    """Prefix chain links of the full pages behind those in `request.hashes`."""
    published: int = 0
    """Pages known to the prefix cache, from the first on."""
    chain: CachedPage | None = None
    """The last of these."""
    chain_broken: bool = False
    """The prefix cache takes no more pages of this sequence."""
    queued_at: float = 0.0
    """When it was admitted, by the engine's clock."""
    started: bool = False
    cached_tokens: int = 0
    described: int = 1
    """The next prompt index whose logprobs are to be published."""

    @property
    def order(self) -> tuple[int, int]:
        return self.request.priority, self.serial

    @property
    def number(self) -> int:
        return self.request.number + self.index

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt_len(self) -> int:
        return len(self.request.ids)

    @property
    def limit(self) -> int:
        """Tokens, prompt and output, at which the sequence ends."""
        return self.prompt_len + self.params.max_tokens

    @property
    def stored(self) -> int:
        """Ids held here: all of them, unless the slot's table has newer ones."""
        return self.prompt_len + len(self.output) // 4

    def move(self, state: SequenceState) -> None:
        """Raises IllegalTransition."""
        if state not in _LEGAL[self.state]:
            raise IllegalTransition(f"sequence {self.serial}: {self.state.name} → {state.name}")
        self.state = state

    def ids(self) -> bytes:
        """int32 LE, prompt and stored output."""
        return self.family.prompt + bytes(self.output)

    def page_ids(self, first: int, end: int, page_size: int) -> list[bytes]:
        """Ids of the full pages first .. end - 1, counted from the sequence's start."""
        width = 4 * page_size
        prompt, start, stop = self.family.prompt, width * first, width * end
        if stop <= len(prompt):
            ids = prompt[start:stop]
        elif start >= len(prompt):
            ids = bytes(self.output[start - len(prompt) : stop - len(prompt)])
        else:
            ids = prompt[start:] + self.output[: stop - len(prompt)]
        return [ids[at : at + width] for at in range(0, len(ids), width)]

    def links_of(self, first: int, ids: list[bytes]) -> list[bytes]:
        """The prefix chain's links of consecutive full pages, whose ids these are; those before were asked for earlier.

        The prompt's came with the request, the others are computed when first needed.
        """
        given = self.request.hashes
        known = len(given) // PREFIX_HASH_BYTES
        links: list[bytes] = []
        for page, page_ids in enumerate(ids, first):
            if page < known:
                links.append(given[PREFIX_HASH_BYTES * page : PREFIX_HASH_BYTES * (page + 1)])
                continue
            if page - known == len(self.links):
                parent = self.links[-1] if self.links else given[-PREFIX_HASH_BYTES:] or prefix_root(self.request.salt)
                self.links.append(prefix_next(parent, page_ids))
            links.append(self.links[page - known])
        return links

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ids that end the sequence; see `request.py` for their precedence."""
        ignored = self.params.ignore_eos and self.request.grammar is None
        return tuple(sorted(self.params.stop_token_ids.union(() if ignored else eos_token_ids)))

    def sampling(self, eos_token_ids: tuple[int, ...]) -> RowSampling:
        """How the worker draws this sequence's tokens."""
        params = self.params
        suppress = self.stop_ids(eos_token_ids) if params.min_tokens else ()
        return RowSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=sequence_seed(params.seed, self.index),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            suppress=np.array(suppress, "<i4").tobytes(),
            min_tokens=params.min_tokens,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs if self.described < self.prompt_len else -1,
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence's terminal outcome on its way to the ledger and to its session."""

    serial: int
    session: int
    finish: Finish


def end_of(
    sequence: Sequence, reason: int, known: int, stop_token_id: int | None = None, error: FinishError | None = None
) -> Ended:
    """The outcome of a sequence that has `known` tokens, prompt included."""
    finish = Finish(
        number=sequence.number,
        reason=reason,
        prompt_tokens=sequence.prompt_len,
        output_tokens=known - sequence.prompt_len,
        cached_tokens=sequence.cached_tokens,
        stop_token_id=stop_token_id,
        error=error,
    )
    return Ended(sequence.serial, sequence.request.session, finish)
