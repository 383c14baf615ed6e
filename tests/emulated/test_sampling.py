"""Sampling kernels on the CPU against the plain definitions of ops/reference.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import structs

from engine_core.ops import reference
from engine_core.ops.cuda.sampling import Sampler, SamplingTables, encode_row
from engine_core.ops.masks import mask_size, mask_words
from engine_core.step import RowSampling
from tests.emulated import EmulatedKernels
from tests.emulated.comparing import CPU, integers

VOCABULARY = 3000
SLOTS = 6
MIXES = (
    RowSampling(temperature=0.0),
    RowSampling(temperature=1.0),
    RowSampling(temperature=0.6, top_k=20, top_p=0.95),
    RowSampling(temperature=1.0, top_p=0.9),
    RowSampling(temperature=1.5, min_p=0.05),
    RowSampling(temperature=1.0, top_k=1),
    RowSampling(temperature=2.0, top_k=1000, top_p=0.99),
    RowSampling(temperature=1.0, top_p=1e-6),
    RowSampling(temperature=30.0, top_p=0.99),
    RowSampling(temperature=1.0, top_p=0.7, min_p=0.1, top_k=500),
    RowSampling(temperature=1.0, min_p=1e-5),
)


@pytest.fixture(scope="module")
def sampler(kernels: EmulatedKernels) -> Sampler:
    return Sampler(SamplingTables(SLOTS, VOCABULARY, CPU), 4, kernels)


def draw(sampler: Sampler, raw: np.ndarray, slot: int, position: int) -> int:
    """The token that slot draws after `position`, as the middle row of a padded batch."""
    logits = torch.from_numpy(np.stack([raw, raw, raw]).astype(np.float32))
    tokens = integers([-7, -7, -7])
    sampler(logits, integers([-1, slot, -1]), integers([0, position, 0]), tokens)
    assert tokens[0] == tokens[2] == -7, "a padding row drew"
    assert int(sampler.tables.last_token[slot]) == int(tokens[1])
    return int(tokens[1])


def best_by_definition(changed: np.ndarray, sampling: RowSampling, position: int) -> np.ndarray:
    """Scores whose largest is drawn; `position` is the drawn token's."""
    if sampling.temperature == 0:
        return changed
    kept = reference.filtered(changed, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) > 0
    noise = [reference.candidate_noise(sampling.seed, position, i) if kept[i] else 0.0 for i in range(len(changed))]
    return np.where(kept, changed / sampling.temperature + np.array(noise), -np.inf)


@pytest.mark.parametrize(("spread", "draws"), [(4.0, 4), (1.0, 1), (0.01, 1)])
@pytest.mark.parametrize("mix", range(len(MIXES)))
def test_draws_by_definition(sampler: Sampler, mix: int, spread: float, draws: int) -> None:
    """Red if a filter's threshold is off by one candidate, ties (the two zeros too) are treated otherwise, or a
    candidate gets another's noise.

    With spread 4 the threshold is found among the likely candidates, else through histograms of the whole row.
    """
    generator = np.random.default_rng(mix)
    raw = generator.standard_normal(VOCABULARY) * spread
    if mix % 2:
        raw = np.round(raw * 4) / 4  # many equal values
    raw = raw.astype(np.float32).astype(np.float64)
    for _ in range(draws):
        sampling = structs.replace(MIXES[mix], seed=int(generator.integers(2**63)) * 2 + 1)
        slot, position = int(generator.integers(SLOTS)), int(generator.integers(1, 9000))
        sampler.tables.put(slot, encode_row(sampling, 1))
        drawn = draw(sampler, raw, slot, position)
        scores = best_by_definition(raw, sampling, position + 1)
        assert scores[drawn] > scores.max() - 1e-5


def test_counts_bias_and_suppression(sampler: Sampler) -> None:
    """Red if the order of edits and penalties changes, prompt tokens count as output, or a draw isn't counted."""
    prompt, output = [7, 7, 9], [5, 4, 5]
    sampling = RowSampling(
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias={11: 30.0, 5: -100.0},
        suppress=np.array([11], "<i4").tobytes(),
        min_tokens=5,
    )
    sampler.tables.put(2, encode_row(sampling, len(prompt)))
    sampler.count_seen(2, integers([*prompt, *output]), len(prompt))
    generator = np.random.default_rng(3)
    for _ in range(4):
        raw = generator.standard_normal(VOCABULARY).astype(np.float32).astype(np.float64)
        raw[7], raw[5] = 5.0, 50.0
        changed = reference.penalized(
            raw,
            prompt=prompt,
            output=output,
            suppress=[11],
            min_tokens=5,
            logit_bias=sampling.logit_bias,
            repetition_penalty=1.3,
            presence_penalty=0.25,
            frequency_penalty=0.5,
        )
        output.append(draw(sampler, raw, 2, len(prompt) + len(output) - 1))
        assert output[-1] == int(changed.argmax())
    assert output[-2:] == [11, 11], "suppressed for longer than min_tokens"


def test_a_masked_row_draws_from_what_its_mask_leaves(sampler: Sampler) -> None:
    """Red if a bit is read for another candidate or another row, penalties or biases undo a mask, or it stays on."""
    generator = np.random.default_rng(8)
    masks = np.full(sampler.masks.numel(), -1, np.int32)
    sampler.masks.copy_(torch.from_numpy(masks))
    few = [3, 31, 32, 1999, VOCABULARY - 1]
    for number, ids in enumerate((few, list(range(7, VOCABULARY, 3)))):
        size = mask_size(VOCABULARY)
        at = 4 + number * size
        masks[at : at + size] = mask_words(np.array(ids), VOCABULARY).view(np.int32)
        for mix, parameters in enumerate(MIXES):
            sampling = structs.replace(parameters, seed=int(generator.integers(2**63)), logit_bias={0: 50.0})
            raw = np.round(generator.standard_normal(VOCABULARY) * 4) / 4
            raw[1] = 60.0
            slot, position = mix % SLOTS, int(generator.integers(1, 9000))
            sampler.tables.put(slot, encode_row(sampling, 1))
            masks[:4] = [-1, number, -1, -1]
            sampler.masks.copy_(torch.from_numpy(masks))
            drawn = draw(sampler, raw, slot, position)
            left = np.full(VOCABULARY, -np.inf)
            left[ids] = raw[ids]
            scores = best_by_definition(left, sampling, position + 1)
            assert scores[drawn] > scores.max() - 1e-5
            masks[:4] = [number, -1, number, -1]
            sampler.masks.copy_(torch.from_numpy(masks))
            free = raw + np.where(np.arange(VOCABULARY) == 0, 50.0, 0.0)
            scores = best_by_definition(free, sampling, position + 1)
            assert scores[draw(sampler, raw, slot, position)] > scores.max() - 1e-5, "another row's mask was felt"
    sampler.masks.fill_(-1)


def test_a_draw_depends_on_no_other_row(sampler: Sampler) -> None:
    """Red if noise or scratch were taken by row of the batch."""
    raw = torch.randn(VOCABULARY) * 3
    for slot, sampling in enumerate((MIXES[1], MIXES[2], MIXES[8])):
        sampler.tables.put(slot, encode_row(structs.replace(sampling, seed=17), 1))
    orders, drawn = ([0, 1, 2], [2, 0, 1], [1, 2, 0]), []
    for order in orders:
        tokens = integers([0, 0, 0])
        sampler(raw.repeat(3, 1), integers(order), integers([40] * 3), tokens)
        drawn.append({slot: int(token) for slot, token in zip(order, tokens, strict=True)})
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("sampling", [RowSampling(temperature=0.0), MIXES[1], MIXES[2]])
def test_bad_logits_draw_nothing(sampler: Sampler, sampling: RowSampling) -> None:
    """Red if NaN or infinity wins a comparison, or a failed draw changes the tables."""
    logits = torch.randn(3, VOCABULARY)
    logits[0, 77], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    for slot in range(3):
        sampler.tables.put(slot, encode_row(sampling, 1))
    sampler.tables.last_token.fill_(42)
    tokens = integers([0, 0, 0])
    sampler(logits, integers([0, 1, 2]), integers([9, 9, 9]), tokens)
    assert tokens.tolist() == [-1, -1, -1]
    assert sampler.tables.last_token.tolist() == [42] * SLOTS


def test_too_many_suppressed_ids_are_refused() -> None:
    """Red if a row's edits could run into the next slot's."""
    sampling = RowSampling(suppress=np.arange(300, dtype="<i4").tobytes(), min_tokens=1)
    with pytest.raises(ValueError, match="300 ids"):
        encode_row(sampling, 1)
