"""Noise for drawing tokens: Philox4x32-10 as a pure function of (seed, position, candidate), in torch.

Owns how random bits become Gumbel noise. Keeps no state: the same arguments give the same noise whatever the batch, the
device or the order of calls. `reference.philox4x32` is the plain definition that this must equal.

Philox (Salmon et al., SC 2011) is called with
    key     = (seed mod 2^32, seed div 2^32)
    counter = (candidate div 4, 0, position, 0)
and word `candidate mod 4` of its output belongs to the candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF

LARGEST_NOISE = 22.88
SMALLEST_NOISE = -2.82
PRUNE = LARGEST_NOISE - SMALLEST_NOISE
"""A candidate whose logit is further below another's can't be drawn: its best noise loses to the other's worst."""


def philox_words(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> Tensor:
    """The four output words, stacked last, of int64 tensors holding uint32 values that broadcast together.

    `key` is (low, high) of the seed, `counter` its words 0 and 2; words 1 and 3 are zero.
    """
    k0, k1 = key
    c0, c2 = counter
    c1 = c3 = torch.zeros_like(c0)
    for _ in range(ROUNDS):
        # An int64 product wraps, but its 64 bits are those of the unsigned product.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK
        c2, c3 = ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise in float32 from uint32 values (in int64): -log(-log(1 - u)), u = (bits + 0.5) / 2^32.

    u near 0 gives the large values, where float32 resolves it finely, so that rare candidates keep their chances. The
    result lies within [SMALLEST_NOISE, LARGEST_NOISE].
    """
    uniform = (bits.float() * 2.0**-32 + 2.0**-33).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def noise_for_all(key: tuple[Tensor, Tensor], positions: Tensor, candidates: int) -> Tensor:
    """Noise [R, candidates] for every candidate of rows with `key` and `positions` [R]."""
    blocks = torch.arange(-(-candidates // 4), device=positions.device)
    words = philox_words((key[0][:, None], key[1][:, None]), (blocks[None, :], positions[:, None]))
    return gumbel(words.reshape(len(positions), -1)[:, :candidates])


def noise_for(key: tuple[Tensor, Tensor], positions: Tensor, candidates: Tensor) -> Tensor:
    """Noise [N] for single candidates [N], each with its row's key and position [N]."""
    words = philox_words(key, (candidates >> 2, positions))
    return gumbel(words.gather(-1, (candidates & 3)[:, None])[:, 0])
