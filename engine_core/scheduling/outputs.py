"""What steps produced, as columns: from the scheduler's events to one `Output` a session.

Owns splitting by session and the logprob columns that go with it. Knows neither scheduling nor protobuf; a step of one
session costs the same few array operations whatever the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine_core.request import Finish, Ids, LogprobColumns, Output, PromptLogprobs
from engine_core.scheduling.rows import SessionRows
from engine_core.scheduling.sequence import Ended
from engine_core.step import LogprobBlock

Index = npt.NDArray[np.int64]
Item = TypeVar("Item", bound=np.generic)


@dataclass(slots=True)
class TokenColumns:
    """New tokens of one result, one row a sequence."""

    sessions: tuple[SessionRows, ...]
    tokens: Ids
    logprobs: LogprobColumns | None = None


@dataclass(slots=True)
class SessionTokens:
    """One session's part of these."""

    numbers: npt.NDArray[np.uint64]
    tokens: Ids
    logprobs: LogprobColumns | None


@dataclass(slots=True)
class Events:
    """What applying one result brought about."""

    step: int
    tokens: list[TokenColumns] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    """(session, stretch)."""
    ended: list[Ended] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence whose first prefill was scheduled."""

    session: int
    number: int
    prompt_tokens: int
    cached_tokens: int
    queued_at: float
    """When it was admitted, by the engine's clock."""


def read_logprobs(block: LogprobBlock | None) -> LogprobColumns | None:
    """A result's block as columns; no copy."""
    if block is None:
        return None
    return LogprobColumns(
        rows=np.frombuffer(block.rows, "<u4"),
        sampled=np.frombuffer(block.sampled, "<f4"),
        ranks=np.frombuffer(block.ranks, "<i4"),
        counts=np.frombuffer(block.counts, "<u4"),
        top_ids=np.frombuffer(block.top_ids, "<i4"),
        top_logprobs=np.frombuffer(block.top_logprobs, "<f4"),
    )


def select_logprobs(columns: LogprobColumns | None, kept: Index, total: int) -> LogprobColumns | None:
    """Logprobs of the rows `kept` of `total`, renumbered by their place in `kept`; None when none of them has any."""
    if columns is None:
        return None
    place = np.full(total, -1, np.int64)
    place[kept] = np.arange(kept.size)
    rows = place[columns.rows]
    wanted = rows >= 0
    if not wanted.any():
        return None
    tops = np.repeat(wanted, columns.counts)
    return LogprobColumns(
        rows=rows[wanted].astype(np.uint32),
        sampled=columns.sampled[wanted],
        ranks=columns.ranks[wanted],
        counts=columns.counts[wanted],
        top_ids=columns.top_ids[tops],
        top_logprobs=columns.top_logprobs[tops],
    )


def split_by_session(columns: TokenColumns) -> Iterator[tuple[int, SessionTokens]]:
    """Each session's rows, in their order."""
    for rows in columns.sessions:
        if rows.index is None:
            yield rows.session, SessionTokens(rows.numbers, columns.tokens, columns.logprobs)
        else:
            logprobs = select_logprobs(columns.logprobs, rows.index, columns.tokens.size)
            yield rows.session, SessionTokens(rows.numbers, columns.tokens[rows.index], logprobs)


def merge_logprobs(parts: list[SessionTokens]) -> LogprobColumns | None:
    """The parts' logprobs, rows counted over their concatenation."""
    blocks: list[LogprobColumns] = []
    offset = 0
    for part in parts:
        if (block := part.logprobs) is not None:
            rows = block.rows + np.uint32(offset)
            blocks.append(
                LogprobColumns(rows, block.sampled, block.ranks, block.counts, block.top_ids, block.top_logprobs)
            )
        offset += part.tokens.size
    if len(blocks) < 2:
        return blocks[0] if blocks else None
    return LogprobColumns(
        rows=np.concatenate([block.rows for block in blocks]),
        sampled=np.concatenate([block.sampled for block in blocks]),
        ranks=np.concatenate([block.ranks for block in blocks]),
        counts=np.concatenate([block.counts for block in blocks]),
        top_ids=np.concatenate([block.top_ids for block in blocks]),
        top_logprobs=np.concatenate([block.top_logprobs for block in blocks]),
    )


class OutputBuffer:
    """What has happened since the last publication, by session."""

    def __init__(self) -> None:
        self._step = 0
        self._outputs: dict[int, Output] = {}
        self._tokens: dict[int, list[SessionTokens]] = {}

    def accept(self, session: int, number: int) -> None:
        self._output(session).accepted.append(number)

    def start(self, started: Started) -> None:
        self._output(started.session).started.append((started.number, started.cached_tokens))

    def finish(self, session: int, finish: Finish) -> None:
        self._output(session).finishes.append(finish)

    def add(self, events: Events) -> None:
        """Everything of a result but the terminal outcomes, which pass through the ledger first."""
        self._step = events.step
        for columns in events.tokens:
            for session, part in split_by_session(columns):
                self._output(session)
                self._tokens.setdefault(session, []).append(part)
        for session, stretch in events.prompt_logprobs:
            self._output(session).prompt_logprobs.append(stretch)

    def drop(self, session: int) -> None:
        """Nothing more is published to this session."""
        self._outputs.pop(session, None)
        self._tokens.pop(session, None)

    def take(self) -> list[Output]:
        """One output for each session to which something happened."""
        outputs, self._outputs = self._outputs, {}
        tokens, self._tokens = self._tokens, {}
        for session, parts in tokens.items():
            output = outputs[session]
            output.numbers = _joined([part.numbers for part in parts])
            output.tokens = _joined([part.tokens for part in parts])
            output.logprobs = merge_logprobs(parts)
        for output in outputs.values():
            output.step = self._step
        return list(outputs.values())

    def _output(self, session: int) -> Output:
        output = self._outputs.get(session)
        if output is None:
            output = self._outputs[session] = Output(session, self._step)
        return output


def _joined(arrays: list[npt.NDArray[Item]]) -> npt.NDArray[Item]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
