"""A device that goes wrong when told: wrappers around a real device's compute and driver table.

Owns the injection. What the wrapped calls do otherwise is the device's own doing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine_core.device.base import Batch
from engine_core.step import Lane

Hook = Callable[[Batch], None]


@dataclass
class FaultyTable:
    """A driver table whose next calls of a name answer with the statuses in `failing[name]`, without being made."""

    table: Any
    failing: dict[str, list[int]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self.table, name)

        def answer(*args: Any) -> Any:
            statuses = self.failing.get(name)
            return (statuses.pop(0),) if statuses else call(*args)

        return answer


@dataclass
class FaultyCompute:
    """A compute with hooks by lane: `before` a forward's own work is enqueued, and `after` that of a call."""

    compute: Any
    before: dict[Lane, Hook] = field(default_factory=dict)
    after: dict[tuple[str, Lane], Hook] = field(default_factory=dict)
    """By call (forward, sample or read) and lane."""
    instead_of_close: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compute, name)

    def forward(self, batch: Batch, ring: int) -> None:
        self.before.get(batch.lane, _nothing)(batch)
        self.compute.forward(batch, ring)
        self._after("forward", batch)

    def sample(self, batch: Batch, ring: int) -> None:
        self.compute.sample(batch, ring)
        self._after("sample", batch)

    def read(self, batch: Batch, ring: int) -> Any:
        sampled = self.compute.read(batch, ring)
        self._after("read", batch)
        return sampled

    def close(self) -> None:
        (self.instead_of_close or self.compute.close)()

    def _after(self, call: str, batch: Batch) -> None:
        self.after.get((call, batch.lane), _nothing)(batch)


def _nothing(batch: Batch) -> None:
    """The device's own work is all there is."""
