"""Noise for drawing tokens: Philox4x32-10 as a pure function of (seed, position, candidate), on the host.

Owns how random bits become Gumbel noise. Keeps no state: the same arguments give the same noise whatever the batch or
the order of calls. `reference.philox4x32` is the plain definition that this must equal. (The integer arithmetic is
numpy's, which takes a third of torch's time for it.)

Philox (Salmon et al., SC 2011) is called with
    key     = (seed mod 2^32, seed div 2^32)
    counter = (candidate div 4, 0, position, 0)
and word `candidate mod 4` of its output belongs to the candidate.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
"""uint32 values, with room for their products."""

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
ROUNDS = 10
HALF = np.uint64(32)
MASK = np.uint64(0xFFFFFFFF)
BLOCK = 8192
"""Counters at a time: their words stay in the nearest caches."""

LARGEST_NOISE = 22.88
SMALLEST_NOISE = -2.82
PRUNE = LARGEST_NOISE - SMALLEST_NOISE
"""A candidate whose logit is further below another's can't be drawn: its best noise loses to the other's worst."""


def philox_words(seeds: Words, counters: Words, positions: Words) -> Words:
    """The four output words [4, N] of N counters (word 0); seeds (uint64) and positions (word 2) are [N] or [1]."""
    k0, k1 = seeds & MASK, seeds >> HALF
    c0, c2 = counters.copy(), np.broadcast_to(positions, counters.shape).copy()
    c1, c3, p0, p1 = (np.zeros_like(c0) for _ in range(4))
    for _ in range(ROUNDS):
        np.multiply(c0, MULTIPLIERS[0], out=p0)
        np.multiply(c2, MULTIPLIERS[1], out=p1)
        _mix(p1, c1, k0, out=c0)
        _mix(p0, c3, k1, out=c2)
        # The products become words 1 and 3 whole; their upper halves go where these are mixed in.
        c1, p1, c3, p0 = p1, c1, p0, c3
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return np.stack((c0, c1 & MASK, c2, c3 & MASK))


def _mix(product: Words, word: Words, key: Words, out: Words) -> None:
    """out = upper half of the product ^ word ^ key, in 32 bits."""
    np.right_shift(product, HALF, out=out)
    np.bitwise_xor(out, word, out=out)
    np.bitwise_xor(out, key, out=out)
    np.bitwise_and(out, MASK, out=out)


def gumbel(bits: Words) -> Tensor:
    """Gumbel noise in float32 from uint32 values: -log(-log(1 - u)), u = (bits + 0.5) / 2^32.

    u near 0 gives the large values, where float32 resolves it finely, so that rare candidates keep their chances. The
    result lies within [SMALLEST_NOISE, LARGEST_NOISE].
    """
    uniform = torch.from_numpy(bits.astype(np.float32)).mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def noise_for_all(seeds: Words, positions: Words, candidates: int) -> Tensor:
    """Noise [R, candidates] for every candidate of rows with `seeds` and `positions` [R]."""
    blocks = -(-candidates // 4)
    noise = torch.empty(len(seeds), blocks, 4)
    for row in range(len(seeds)):
        for first in range(0, blocks, BLOCK):
            counters = np.arange(first, min(first + BLOCK, blocks), dtype=np.uint64)
            words = philox_words(seeds[row : row + 1], counters, positions[row : row + 1])
            noise[row, first : first + len(counters)] = gumbel(words).T
    return noise.view(len(seeds), -1)[:, :candidates]


def noise_for(seeds: Words, positions: Words, candidates: Words) -> Tensor:
    """Noise [N] for single candidates [N], each with its row's seed and position [N]."""
    words = philox_words(seeds, candidates >> np.uint64(2), positions)
    return gumbel(words[candidates & np.uint64(3), np.arange(len(candidates))])
