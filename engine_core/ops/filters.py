"""top_k, top_p and min_p as one number a row: candidates at or above it may be drawn.

Owns the meaning of the three filters, which is free of ties and of order:
  * top_k keeps the k largest logits, and all that equal the k-th.
  * top_p then keeps a candidate if those strictly more likely than it, among what is left, sum to less than top_p: the
    smallest set that reaches top_p, and all that equal its last member. The most likely one always stays.
  * min_p then keeps a candidate if its probability is at least min_p times the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Filters:
    """Parameters of R rows, one tensor each [R]."""

    top_k: Tensor
    """int64; 0 is off."""
    top_p: Tensor
    """float32; 1 is off."""
    min_p: Tensor
    """float32; 0 is off."""

    def rows(self, index: Tensor) -> Filters:
        return Filters(self.top_k[index], self.top_p[index], self.min_p[index])


def cutoff(ordered: Tensor, filters: Filters, total: Tensor) -> Tensor:
    """The smallest logit [R] that may be drawn.

    `ordered` [R, K] holds each row's K largest logits in descending order, shifted so that the first is 0. `total` [R]
    is the sum of exp over the whole row. The answer is exact if it is above the last of `ordered`, or if K is the
    whole vocabulary.
    """
    width = ordered.shape[1]
    last = (torch.where(filters.top_k > 0, filters.top_k, width).clamp(max=width) - 1)[:, None]
    by_rank = torch.where(filters.top_k[:, None] > 0, ordered.gather(1, last), -torch.inf)
    weights = torch.where(ordered >= by_rank, ordered.exp(), 0.0)
    sums = weights.cumsum(1)
    mass = torch.where(filters.top_k[:, None] > 0, sums[:, -1:], total[:, None])
    limit = torch.where(filters.top_p < 1, filters.top_p, torch.inf)[:, None] * mass
    by_mass = ordered.gather(1, (_strictly_above(ordered, sums) < limit).sum(1, keepdim=True).sub_(1).clamp_(min=0))
    by_mass = torch.where(filters.top_p[:, None] < 1, by_mass, -torch.inf)
    return torch.maximum(torch.maximum(by_rank, by_mass)[:, 0], filters.min_p.log())


def _strictly_above(ordered: Tensor, sums: Tensor) -> Tensor:
    """Mass [R, K] of the candidates strictly more likely than each, from the running sums of an ordered row."""
    before = functional.pad(sums[:, :-1], (1, 0))
    starts = functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    return torch.where(starts, before, 0.0).cummax(1).values
