"""A step's inputs on their way to the GPU: pinned buffers in a ring, persistent device buffers, one copy a step.

Owns rule S1: graphs read device buffers whose addresses never change; the host fills a pinned buffer, enqueues the copy
before the replay and records an *input-staged* event right behind it; the buffer is filled again only after that event.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_core.device.driver import Driver
from engine_core.device.lanes import LaneStream, record

RING = 2
"""A step's copy starts behind the step before it: a refresh waits only where two more are in flight already."""
INPUT_EVENT_FLAGS = 0x1 | 0x2
"""Blocking, without timing, as completions are."""


class Staging:
    """Inputs of one lane's forwards: up to `rows` rows and `tokens` tokens of chunks.

    Fields by row come first, so that a decode step copies only those.
    """

    def __init__(self, driver: Driver, target: LaneStream, rows: int, tokens: int, device: torch.device) -> None:
        by_row = (
            ("targets", np.int64, rows),
            ("picks", np.int64, rows),
            ("slots", np.int32, rows),
            ("positions", np.int32, rows),
            ("pages", np.int32, rows),
            ("sample_slots", np.int32, rows),
            ("sample_positions", np.int32, rows),
        )
        by_token = (
            ("ids", np.int32, tokens),
            ("token_slots", np.int32, tokens),
            ("token_positions", np.int32, tokens),
        )
        self._driver = driver
        self._target = target
        self._row_bytes = sum(np.dtype(kind).itemsize * count for _, kind, count in by_row)
        self._bytes = self._row_bytes + sum(np.dtype(kind).itemsize * count for _, kind, count in by_token)
        self._device = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
        self._pinned = [torch.zeros(self._bytes, dtype=torch.uint8, pin_memory=True) for _ in range(RING)]
        self._views: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(RING)]
        self.on_device: dict[str, torch.Tensor] = {}
        offset = 0
        for name, kind, count in (*by_row, *by_token):
            size = np.dtype(kind).itemsize * count
            self.on_device[name] = self._device[offset : offset + size].view(_TORCH[kind])
            for views, pinned in zip(self._views, self._pinned, strict=True):
                views[name] = pinned[offset : offset + size].numpy().view(kind)
            offset += size
        self._events = [driver.call("event_create", INPUT_EVENT_FLAGS) for _ in range(RING)]
        self._used = [False] * RING
        self._next = 0
        self.waits = 0
        """Times that a refresh had to wait for its slot's copy."""

    def begin(self) -> dict[str, npt.NDArray[Any]]:
        """The next pinned buffer's fields, to be filled; waits until its last copy is done."""
        self._await(self._next)
        return self._views[self._next]

    def _await(self, slot: int) -> None:
        if self._used[slot] and not self._driver.event_done(self._events[slot]):
            self.waits += 1
            self._driver.event_wait(self._events[slot])

    def send(self, *, tokens: bool) -> None:
        """Enqueue the copy on torch's current stream, which is the lane's, and record the input-staged event.

        Whatever else the step copies from pinned memory must have been enqueued before.
        """
        slot = self._next
        size = self._bytes if tokens else self._row_bytes
        self._device[:size].copy_(self._pinned[slot][:size], non_blocking=True)
        record(self._driver, self._target, self._events[slot])
        self._used[slot] = True
        self._next = (slot + 1) % RING

    def close(self) -> None:
        for event in self._events:
            self._driver.call("event_destroy", event)


_TORCH: dict[Any, torch.dtype] = {np.int64: torch.int64, np.int32: torch.int32}
