"""A step's inputs on their way to the GPU: pinned buffers in a ring, persistent device buffers, one copy a step.

Owns rule S1: graphs read device buffers whose addresses never change; the host fills a pinned buffer, enqueues the copy
before the replay and records an *input-staged* event right behind it; the buffer is filled again only after that event.
Its opposite, `--staged-inputs off` (rule S8), is here too, to be measured against: one buffer, whose copy is part of
the graphs, filled again only once the lane is idle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_core.device.driver import Driver
from engine_core.device.lanes import LaneStream, record

RING = 2
"""A step's copy starts behind the step before it: a refresh waits only where two more are in flight already."""
BY_ROW: tuple[tuple[str, Any], ...] = (
    ("targets", np.int64),
    ("picks", np.int64),
    ("slots", np.int32),
    ("positions", np.int32),
    ("pages", np.int32),
    ("sample_slots", np.int32),
    ("sample_positions", np.int32),
)
BY_TOKEN: tuple[tuple[str, Any], ...] = (("ids", np.int32), ("token_slots", np.int32), ("token_positions", np.int32))
"""Fields and their types."""
NO_SLOT = ("slots", "sample_slots", "token_slots")
"""Padding: such rows and tokens read and write nothing (rule S6)."""
INPUT_EVENT_FLAGS = 0x1 | 0x2
"""Blocking, without timing, as completions are."""


class Staging:
    """Inputs of one lane's forwards: up to `rows` rows and `tokens` tokens of chunks.

    Fields by row come first, so that a decode step copies only those.
    """

    def __init__(
        self,
        driver: Driver,
        target: LaneStream,
        rows: int,
        tokens: int,
        device: torch.device,
        *,
        ring: int = RING,
        in_graph: bool = False,
    ) -> None:
        """`in_graph`: the copies are captured (`copy_in_graph`), and the ring is one buffer."""
        self._driver = driver
        self._target = target
        self._in_graph = in_graph
        self._ring = ring = 1 if in_graph else ring
        fields = [(name, kind, rows) for name, kind in BY_ROW] + [(name, kind, tokens) for name, kind in BY_TOKEN]
        self._row_bytes = rows * sum(np.dtype(kind).itemsize for _, kind in BY_ROW)
        self._bytes = self._row_bytes + tokens * sum(np.dtype(kind).itemsize for _, kind in BY_TOKEN)
        pinned = device.type == "cuda"
        self._device = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(self._bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(ring)]
        self._views: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(ring)]
        self.on_device: dict[str, torch.Tensor] = {}
        offset = 0
        for name, kind, count in fields:
            size = np.dtype(kind).itemsize * count
            self.on_device[name] = self._device[offset : offset + size].view(_TORCH[kind])
            for views, buffer in zip(self._views, self._pinned, strict=True):
                views[name] = buffer[offset : offset + size].numpy().view(kind)
            offset += size
        for name in NO_SLOT:
            self.on_device[name].fill_(-1)
            for views in self._views:
                views[name][:] = -1
        self._events = [driver.call("event_create", INPUT_EVENT_FLAGS) for _ in range(ring)]
        self._used = [False] * ring
        self._next = 0
        self.waits = 0
        """Times that a refresh had to wait for its buffer's copy."""
        self.drains = 0
        """Times that a refresh waited for the whole lane."""

    def begin(self) -> dict[str, npt.NDArray[Any]]:
        """The next pinned buffer's fields, to be filled; waits until what was in them isn't needed any more."""
        if self._in_graph:
            self.drains += 1
            self._driver.stream_wait(self._target.stream)
        else:
            self._await(self._next)
        return self._views[self._next]

    def _await(self, slot: int) -> None:
        if self._used[slot] and not self._driver.event_done(self._events[slot]):
            self.waits += 1
            self._driver.event_wait(self._events[slot])

    def replay(self, graph: Callable[[], None], *, tokens: bool) -> None:
        """Hand what was filled to a graph that reads it."""
        if not self._in_graph:
            self.send(tokens=tokens)
        graph()

    def send(self, *, tokens: bool) -> None:
        """Enqueue the copy on torch's current stream, which is the lane's, and record the input-staged event.

        Whatever else the step copies from pinned memory must have been enqueued before.
        """
        slot = self._next
        self._copy(slot, tokens=tokens)
        record(self._driver, self._target, self._events[slot])
        self._used[slot] = True
        self._next = (slot + 1) % self._ring

    def copy_in_graph(self, *, tokens: bool) -> None:
        """The first thing in every graph that reads the fields; nothing unless copies are captured."""
        if self._in_graph:
            self._copy(0, tokens=tokens)

    def _copy(self, slot: int, *, tokens: bool) -> None:
        size = self._bytes if tokens else self._row_bytes
        self._device[:size].copy_(self._pinned[slot][:size], non_blocking=True)

    def close(self) -> None:
        for event in self._events:
            self._driver.call("event_destroy", event)


_TORCH: dict[Any, torch.dtype] = {np.int64: torch.int64, np.int32: torch.int32}
