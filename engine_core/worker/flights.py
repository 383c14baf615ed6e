"""Launched work as the runner keeps it, from launch to reply: a step on the primary lane, a batch on the prefill lane.

Owns the fields and nothing else: what is done with them, and in which order, is the runner's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_core.device.base import Batch
from engine_core.device.guard import Owned
from engine_core.device.lanes import Completion
from engine_core.worker.unconstrained import Refused

if TYPE_CHECKING:
    from engine_core.device.timing import Span


@dataclass(slots=True)
class PrefillFlight:
    """A prefill batch on the prefill lane, from launch to the reply that carries its result."""

    step: int
    owned: Owned
    ring: int
    batch: Batch
    completion: Completion | None = None
    span: Span | None = None
    drawing: Span | None = None
    """Of its tokens, on the primary lane, at the join."""
    launched: float | None = None
    busy_us: int = 0
    error: str | None = None
    refused: list[Refused] = field(default_factory=list)
    late: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepFlight:
    """One plan on the primary lane, from launch to its reply."""

    step: int
    owned: Owned
    ring: int
    batch: Batch
    started: float
    prompts: bool = False
    """It holds chunks or starts rows, on which a batch of the prefill lane may build."""
    joined: list[PrefillFlight] = field(default_factory=list)
    """Prefill batches whose results travel with this step."""
    completion: Completion | None = None
    """None while nothing was launched: an empty plan that waits for the prefill in flight."""
    superseded: list[Completion] = field(default_factory=list)
    """Completions from before a batch joined it, which prove the step but not the batch's tokens."""
    span: Span | None = None
    error: str | None = None
    refused: list[Refused] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    """Slots of the plan's decode rows that aren't in the batch …"""
    late_chunks: list[int] = field(default_factory=list)
    """… and of its chunks' rows that are in it without drawing."""
