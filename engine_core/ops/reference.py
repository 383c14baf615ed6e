"""Slow, obvious versions of what the fast code computes; tests compare against them, products never call them.

Owns the definitions: attention over pages, rotary embedding, RMS norm, and drawing a token. Float32 or float64 on the
host, loops where a loop is the definition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). All words are uint32."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def candidate_bits(seed: int, position: int, candidate: int) -> int:
    """The 32 random bits of a candidate at a position (index in prompt + output of the token drawn)."""
    key = (seed & _WORD, seed >> 32)
    return philox4x32(key, (candidate // 4, 0, position, 0))[candidate % 4]


def candidate_noise(seed: int, position: int, candidate: int) -> float:
    """Gumbel noise of a candidate."""
    u = min((candidate_bits(seed, position, candidate) + 0.5) / 2**32, 1 - 2**-24)
    return -math.log(-math.log1p(-u))


def penalized(
    logits: Floats,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    suppress: Sequence[int] = (),
    min_tokens: int = 0,
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> Floats:
    """Raw logits [V] as changed by everything that comes before the temperature."""
    changed = logits.astype(np.float64, copy=True)
    if len(output) < min_tokens:
        changed[list(suppress)] = -np.inf
    for token, bias in (logit_bias or {}).items():
        changed[token] += bias
    for token in {*prompt, *output}:
        changed[token] = (
            changed[token] / repetition_penalty if changed[token] > 0 else changed[token] * repetition_penalty
        )
    for token in set(output):
        changed[token] -= frequency_penalty * list(output).count(token) + presence_penalty
    return changed


def filtered(logits: Floats, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Floats:
    """Probabilities [V] that a token is drawn with, from penalized logits; temperature is above 0."""
    scaled = (logits - logits.max()) / temperature
    kept = np.ones(len(scaled), np.bool_)
    if top_k > 0:
        kept &= scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
    if top_p < 1:
        probabilities = _softmax(np.where(kept, scaled, -np.inf))
        above = np.array([probabilities[scaled > value].sum() for value in scaled])
        kept &= above < top_p
    if min_p > 0:
        kept &= scaled >= math.log(min_p)
    return _softmax(np.where(kept, scaled, -np.inf))


def _softmax(x: Floats) -> Floats:
    weights = np.exp(x - x.max())
    return np.asarray(weights / weights.sum())


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x [..., H] over its root mean square, times weight [H]."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


def rotate(x: Floats, position: int, frequencies: Floats, scale: float = 1.0) -> Floats:
    """A head [D] at `position`: element i turns with element i + D/2 by position * frequencies[i]."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        cos, sin = math.cos(position * frequencies[i]) * scale, math.sin(position * frequencies[i]) * scale
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def paged_attention(
    q: Floats, keys: Floats, values: Floats, pages: Sequence[int], page_size: int, position: int, scale: float
) -> Floats:
    """One query token [Hq, D] at `position` over keys and values [N, Hkv, D] in a pool; returns [Hq, D].

    The token at position p of the sequence lies at pages[p // page_size] * page_size + p % page_size; positions
    0 .. `position` are attended to. Query heads share key/value heads in consecutive groups.
    """
    where = [pages[p // page_size] * page_size + p % page_size for p in range(position + 1)]
    group = q.shape[0] // keys.shape[1]
    out = np.empty_like(q)
    for head in range(q.shape[0]):
        k, v = keys[where, head // group], values[where, head // group]
        out[head] = _softmax(k @ q[head] * scale) @ v
    return out
