"""Rows of the simulated worker, and what is in flight for them."""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.step import RowSampling


@dataclass
class Row:
    """What the worker knows of a row; work in flight keeps it, whoever gets the slot next."""

    slot: int
    prompt_len: int
    ids: list[int]
    pages: list[int]
    sampling: RowSampling
    computed: int
    launched: int
    output: int
    last_token: int = -1
    grammar: int = 0
    unread: bool = False
    """It was launched to draw a token that hasn't been collected yet."""
    late: bool = False
    """It drew nothing when it was planned to, and hasn't caught up."""


@dataclass
class Work:
    """Positions start .. end - 1 of a row, on one lane."""

    row: Row
    start: int
    end: int
    decode: bool
    samples: bool
    late: bool = False
    """It draws nothing, though it ends the row's ids: its last position will be computed again."""


@dataclass
class Batch:
    step: int
    work: list[Work]
    executed: bool = False
    error: str | None = None


@dataclass
class Pending:
    step: int
    decode: list[Work]
    chunks: list[Work]
    empty: bool
    late: list[int]
    """Slots of decode rows that were left out."""
