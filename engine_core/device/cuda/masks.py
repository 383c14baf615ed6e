"""Masks on their way to the GPU: pinned buffers in a ring, one copy a step that has a mask, none for the others.

Owns what the sampler's `masks` hold when a draw reads them. Rule S1 is kept on a ring of its own: the copy is enqueued
right before the draw, with an input-staged event behind it, and a buffer is filled again only after that event.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_core.device.base import RowMask
from engine_core.device.cuda.staging import INPUT_EVENT_FLAGS
from engine_core.device.driver import Driver
from engine_core.device.lanes import LaneStream, record
from engine_core.ops.masks import mask_size


class MaskStaging:
    """`pinned` buffers and the one `on_device` are laid out as `Sampler.masks`: the rows' numbers, then the masks."""

    def __init__(
        self,
        driver: Driver,
        target: LaneStream,
        pinned: Sequence[torch.Tensor],
        on_device: torch.Tensor,
        rows: int,
        vocab_size: int,
    ) -> None:
        """`target` is the primary lane's stream; `on_device` names no mask yet."""
        self._driver = driver
        self._target = target
        self._pinned = pinned
        self._events = [driver.call("event_create", INPUT_EVENT_FLAGS) for _ in pinned]
        self._used = [False] * len(pinned)
        self._next = 0
        self.waits = 0
        """Times that a refresh had to wait for its buffer's copy."""
        self._on_device = on_device
        self._rows = rows
        self._size = mask_size(vocab_size)
        self._named = False
        """The device's buffer names a mask for some row."""

    def send(self, masks: Sequence[RowMask]) -> None:
        """Enqueue what the next draw's rows may draw on torch's current stream, the primary lane's."""
        if not masks and not self._named:
            return
        slot = self._begin()
        words = self._pinned[slot].numpy()
        words[: self._rows] = -1
        by_number = words[self._rows :].view("<u4").reshape(-1, self._size)
        for number, mask in enumerate(masks):
            words[mask.row] = number
            by_number[number] = mask.words[: self._size]
        end = self._rows + len(masks) * self._size
        self._on_device[:end].copy_(self._pinned[slot][:end], non_blocking=True)
        record(self._driver, self._target, self._events[slot])
        self._used[slot] = True
        self._next = (slot + 1) % len(self._pinned)
        self._named = bool(masks)

    def _begin(self) -> int:
        """The next buffer; waits until its last copy is done."""
        slot = self._next
        if self._used[slot] and not self._driver.event_done(self._events[slot]):
            self.waits += 1
            self._driver.event_wait(self._events[slot])
        return slot

    def close(self) -> None:
        for event in self._events:
            self._driver.call("event_destroy", event)
