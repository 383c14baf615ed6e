"""Logprobs: of the raw distribution, whatever the sampling parameters are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine_core.device.base import PromptRows
from engine_core.step import LogprobBlock, RowSampling
from engine_core.worker import logprobs
from engine_core.worker.logprobs import describe
from engine_core.worker.sampler import Sampler

VOCAB = 40
LOGITS = 2 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(8))


def sample(*rows: RowSampling, logits: torch.Tensor = LOGITS) -> tuple[list[int], LogprobBlock | None]:
    sampler = Sampler(len(rows), logits.shape[1], torch.device("cpu"))
    for slot, row in enumerate(rows):
        sampler.set_row(slot, row, 2, np.array([1, 2, 3, 3], np.int32))
    slots = np.arange(len(rows), dtype=np.int32)
    sampled = sampler.sample(logits[: len(rows)], slots, np.full_like(slots, 4))
    return sampled.tokens.tolist(), sampled.logprobs


def floats(data: bytes) -> list[float]:
    return [float(value) for value in np.frombuffer(data, "<f4")]


def ints(data: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(data, "<i4")]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"temperature": 3.0},
        {"top_k": 2, "top_p": 0.5},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0},
        {"logit_bias": {7: 90.0}},
        {"suppress": np.arange(20, dtype="<i4").tobytes(), "min_tokens": 9},
    ],
)
def test_parameters_change_the_draw_and_not_the_logprobs(changes: dict[str, Any]) -> None:
    """Red when logprobs are taken after the temperature, a filter, a penalty, the bias or the suppression."""
    tokens, block = sample(*(RowSampling(**changes, seed=seed, logprobs=5) for seed in range(4)))
    assert block is not None
    exact = LOGITS.double().log_softmax(-1)
    for row, token in enumerate(tokens):
        assert floats(block.sampled)[row] == pytest.approx(exact[row, token].item(), abs=1e-5)
        assert ints(block.ranks)[row] == 1 + int((exact[row] > exact[row, token]).sum())
        best = exact[row].topk(5)
        assert ints(block.top_ids)[5 * row : 5 * row + 5] == best.indices.tolist()
        assert floats(block.top_logprobs)[5 * row : 5 * row + 5] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_each_row_gets_as_many_as_it_asked_for() -> None:
    """Red when rows without logprobs are described, or counts and columns don't fit together."""
    asked = [-1, 3, 0, 20]
    _, block = sample(*(RowSampling(seed=slot, logprobs=count) for slot, count in enumerate(asked)))
    assert block is not None
    assert ints(block.rows) == [1, 2, 3]
    assert ints(block.counts) == [3, 0, 20]
    assert len(floats(block.sampled)) == len(ints(block.ranks)) == 3
    assert ints(block.top_ids) == [*LOGITS[1].topk(3).indices.tolist(), *LOGITS[3].topk(20).indices.tolist()]
    assert len(floats(block.top_logprobs)) == 23


def test_no_row_asks() -> None:
    """Red when logprobs are computed for nobody."""
    assert sample(RowSampling(), RowSampling())[1] is None


def test_more_alternatives_than_the_vocabulary_holds() -> None:
    """Red when top-N beyond a tiny vocabulary fails the step."""
    _, block = sample(RowSampling(logprobs=20), logits=torch.tensor([[0.5, 0.1, 0.3]]))
    assert block is not None
    assert ints(block.top_ids) == [0, 2, 1]
    assert ints(block.counts) == [3]


def test_equal_logits_rank_by_id() -> None:
    """Red when ties are ranked as the kernel happens to find them, also at the border of the alternatives."""
    logits = torch.zeros(3, 1000)
    logits[0, [900, 17, 400]] = 1.0
    logits[1] = torch.arange(1000).remainder(7).float()
    described = describe(logits, torch.tensor([400, 13, 5]), 4)
    assert described.ranks.tolist() == [2, 2, 6]
    assert described.top_ids.tolist() == [[17, 400, 900, 0], [6, 13, 20, 27], [0, 1, 2, 3]]


class Linear:
    """A head that counts how many rows of logits exist at once."""

    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(1))
        self.largest = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, len(hidden))
        return hidden @ self.weight.T


def test_prompt_logprobs_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a prompt's logits exist all at once, or blocks are joined in a wrong order or place."""
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", 4 * VOCAB * 4)
    head = Linear()
    hidden = torch.randn(10, 8, generator=torch.Generator().manual_seed(2))
    targets = np.arange(3, 33, 3, dtype=np.int32)
    sampler = Sampler(1, VOCAB, torch.device("cpu"))
    block = sampler.prompt_logprobs(head, hidden, PromptRows(row=0, slot=0, start=16, targets=targets, top=2))
    assert head.largest == 4
    assert (block.slot, block.start, block.top) == (0, 17, 2)
    exact = head.logits(hidden).double().log_softmax(-1)
    own = exact[torch.arange(10), torch.from_numpy(targets).long()]
    assert floats(block.logprobs) == pytest.approx(own.tolist(), abs=1e-5)
    assert ints(block.ranks) == (1 + (exact > own[:, None]).sum(1)).tolist()
    assert ints(block.top_ids) == exact.topk(2).indices.flatten().tolist()
    assert floats(block.top_logprobs) == pytest.approx(exact.topk(2).values.flatten().tolist(), abs=1e-5)
