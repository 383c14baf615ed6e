"""Philox4x32-10 and the noise made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine_core.ops import philox, reference
from engine_core.ops.philox import LARGEST_NOISE, SMALLEST_NOISE, Words, gumbel, noise_for, noise_for_all, philox_words

ALL = 0xFFFFFFFF
KNOWN_ANSWERS = [
    # Random123's kat_vectors, lines "philox4x32 10": counter, key, result
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    """Red when the generator isn't Philox4x32-10."""
    assert reference.philox4x32(key, counter) == expected


def words(*values: int) -> Words:
    return np.array(values, np.uint64)


def test_vector_version_equals_the_definition() -> None:
    """Red when a product loses bits, or key or counter words change places."""
    rng = np.random.default_rng(0)
    seeds, counters, positions = (rng.integers(0, 2**bits, 50, dtype=np.uint64) for bits in (64, 32, 32))
    found = philox_words(seeds, counters, positions)
    for i in range(50):
        seed, counter, position = int(seeds[i]), int(counters[i]), int(positions[i])
        expected = reference.philox4x32((seed & ALL, seed >> 32), (counter, 0, position, 0))
        assert tuple(found[:, i].tolist()) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_noise_of_candidates(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a candidate's noise depends on anything but seed, position and the candidate."""
    monkeypatch.setattr(philox, "BLOCK", 4)
    whole = noise_for_all(words(seed, 5), words(17, 3), 43)
    assert whole.shape == (2, 43)
    candidates = [42, 0, 1, 2, 3, 4, 41]
    count = len(candidates)
    some = noise_for(words(*[seed] * count), words(*[17] * count), words(*candidates))
    assert torch.equal(some, whole[0, candidates])
    for candidate in candidates:
        expected = reference.candidate_noise(seed, 17, candidate)
        assert math.isclose(whole[0, candidate].item(), expected, rel_tol=1e-5, abs_tol=1e-5)


def test_noise_is_bounded() -> None:
    """Red when the bounds by which hopeless candidates are dropped don't hold: draws would no longer be exact."""
    ends = gumbel(words(0, 1, 2**31, ALL - 1, ALL))
    assert bool(ends.isfinite().all())
    assert ends[0].item() == ends.max().item() <= LARGEST_NOISE
    assert ends[-1].item() == ends.min().item() >= SMALLEST_NOISE


def test_noise_is_gumbel_distributed() -> None:
    """Red when the transform isn't the Gumbel quantile (a sign, a swapped log)."""
    sample = np.sort(noise_for_all(words(9), words(1), 40_000)[0].numpy())
    expected = np.exp(-np.exp(-sample))
    observed = (np.arange(len(sample)) + 0.5) / len(sample)
    assert np.abs(expected - observed).max() < 1.63 / math.sqrt(len(sample))
