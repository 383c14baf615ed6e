"""Masks on their way through a runner: to the batch that draws, and back to whoever makes the next one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from engine_core.device.base import Int32, RowMask
from engine_core.errors import ProtocolViolation
from engine_core.ops.masks import mask_words
from engine_core.step import PrefillChunk, RowSampling, RowStart
from engine_core.worker.unconstrained import Unconstrained
from tests.device.rig import VOCAB, RunnerRig, packed, plan, row


class Every(Unconstrained):
    """Slot 1 draws a token one above the last, slot 2 nothing at all."""

    def __init__(self) -> None:
        self.next = {1: 500}
        self.started: list[tuple[int, int, list[int]]] = []

    def start(self, slot: int, key: int, output: Int32) -> None:
        self.started.append((slot, key, output.tolist()))

    def masks(self, slots: Int32) -> tuple[list[RowMask], list[tuple[int, str]]]:
        masks = []
        for index, slot in enumerate(slots.tolist()):
            if slot in self.next:
                masks.append(RowMask(index, mask_words(np.array([self.next[slot]]), VOCAB)))
        return masks, [(slot, "stuck") for slot in slots.tolist() if slot == 2]

    def drawn(self, slots: Int32, tokens: npt.NDArray[np.int32]) -> None:
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if slot in self.next:
                self.next[slot] = token + 1


@pytest.mark.parametrize("lane", [False, True])
def test_masks_reach_the_draw_and_tokens_the_next_mask(lane: bool) -> None:
    """Red when a row draws what its mask forbids, another row feels it, or the mask of a joined prefill is lost."""
    starts = [row(0, [1, 2, 3], [0, 4]), row(1, [4, 5], [1, 5]), row(2, [6, 7], [2, 6])]
    chunks = [PrefillChunk(0, 0, 3, True), PrefillChunk(1, 0, 2, True), PrefillChunk(2, 0, 2, True)]
    drawn: list[list[list[int]]] = []
    refused: list[list[tuple[int, str]]] = []
    for constraints in (Every(), Unconstrained()):
        rig = RunnerRig(constraints=constraints)
        rig.runner.launch(plan(1, starts=starts, chunks=chunks, lane=lane))
        results = rig.runner.collect()
        for step in (2, 3, 4):
            rig.runner.launch(plan(step, decode=[0, 1] if step > 2 else []))
            results += rig.runner.collect()
        prefill = next(result.prefills[0] for result in results if result.prefills)
        columns = [prefill.tokens, *(result.tokens for result in results if result.tokens)]
        drawn.append([np.frombuffer(column, "<i4").tolist() for column in columns])
        refused.append([entry for result in results for entry in result.refused])
    bound, free = drawn
    assert [tokens[1] for tokens in bound] == [500, 501, 502]
    assert [tokens[0] for tokens in bound] == [tokens[0] for tokens in free]
    assert [tokens[1] for tokens in free] != [500, 501, 502]
    assert refused == [[(2, "stuck")], []]


def test_a_row_starts_with_its_key_and_what_it_drew() -> None:
    """Red when a preempted row's output is left out, or counted from the wrong end of its ids."""
    constraints = Every()
    rig = RunnerRig(constraints=constraints)
    start = RowStart(3, 2, packed([4, 5, 8, 9]), 0, packed([1]), RowSampling(), grammar=7)
    rig.run(plan(1, starts=[start], chunks=[PrefillChunk(3, 0, 4, True)]))
    assert constraints.started == [(3, 7, [8, 9])]


def test_a_worker_without_grammars_takes_no_row_that_follows_one() -> None:
    """Red when a row would be drawn freely although it follows a grammar."""
    with pytest.raises(ProtocolViolation, match="can't serve"):
        RunnerRig().run(
            plan(
                1,
                starts=[RowStart(0, 1, packed([4]), 0, packed([1]), RowSampling(), grammar=7)],
                chunks=[PrefillChunk(0, 0, 1, True)],
            )
        )
