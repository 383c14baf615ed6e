"""Masks on their way to a GPU, which is simulated: its copies run when the test says so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine_core.device.base import RowMask
from engine_core.device.cuda.masks import MaskStaging
from engine_core.device.cuda.staging import RING
from engine_core.device.driver import Driver
from engine_core.device.fake_driver import FakeTable
from engine_core.device.lanes import LaneStream
from engine_core.ops.masks import allowed_ids, mask_words

ROWS, VOCAB = 4, 100
SIZE = 4


class Unbounded:
    def bounded(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Held:
    """Streams run only when the test, or a wait, makes them."""

    def fault(self, call: str) -> tuple[int, bool] | None:
        return None

    def progress(self, table: FakeTable) -> None:
        return None


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table = FakeTable(Held())
        driver = Driver(self.table, Unbounded())
        self.stream = driver.call("stream_create", 1, 0)
        self.on_device = torch.full((ROWS * (1 + SIZE),), -1, dtype=torch.int32)
        pinned = [torch.empty_like(self.on_device) for _ in range(RING)]
        self.staging = MaskStaging(driver, LaneStream(self.stream), pinned, self.on_device, ROWS, VOCAB)
        self.copied: list[int] = []
        at_once: Callable[..., torch.Tensor] = torch.Tensor.copy_

        def later(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            assert non_blocking
            self.copied.append(len(source))

            def copy() -> None:
                at_once(to, source)

            self.table.enqueue(self.stream, copy)
            return to

        monkeypatch.setattr(torch.Tensor, "copy_", later)

    def draw(self) -> list[list[int] | None]:
        """What each row may draw when a step's draw comes behind what was sent; None: anything."""
        seen: list[list[int] | None] = []
        self.table.enqueue(self.stream, lambda: seen.extend(map(self._allowed, range(ROWS))))
        return seen

    def _allowed(self, row: int) -> list[int] | None:
        words = self.on_device.numpy()
        number = int(words[row])
        if number < 0:
            return None
        mask = words[ROWS + number * SIZE :][:SIZE].view(np.uint32)
        return np.flatnonzero(allowed_ids(mask, VOCAB)).tolist()


def mask(row: int, *ids: int) -> RowMask:
    return RowMask(row, np.append(mask_words(np.array(ids), VOCAB), np.uint32(7)))  # one word too many, as they come


def test_each_draw_sees_its_own_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a buffer is filled before its copy is done, or a mask outlives its step (rule S1)."""
    rig = Rig(monkeypatch)
    steps = [[mask(0, 5), mask(2, 31, 32, 99)], [mask(1, 6)], [], [mask(3, 7)], [mask(3, 8), mask(0, 9)]]
    seen = []
    for masks in steps:
        rig.staging.send(masks)
        seen.append(rig.draw())
    rig.table.run_all()
    assert seen == [
        [[5], None, [31, 32, 99], None],
        [None, [6], None, None],
        [None, None, None, None],
        [None, None, None, [7]],
        [[9], None, None, [8]],
    ]
    assert rig.staging.waits, "no buffer was wanted before its copy was done"


def test_steps_without_masks_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when rows without masks pay for a copy, or more is copied than the masks of a step."""
    rig = Rig(monkeypatch)
    for masks in ([], [mask(0, 5)], [], [], [mask(1, 1), mask(2, 2)]):
        rig.staging.send(masks)
    assert rig.copied == [ROWS + SIZE, ROWS, ROWS + 2 * SIZE]
