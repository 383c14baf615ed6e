"""Logprobs of the raw distribution: of sampled tokens and of a prompt's own.

Owns their meaning: natural logarithms of the softmax of the model's logits, before any sampling parameter. A token's
rank is 1 plus the number of tokens that are more likely, tokens of equal logit ranking by their ids; alternatives stand
in that same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20
"""Logits of a prompt that exist at once."""


@dataclass(frozen=True, slots=True)
class Described:
    """R tokens within their distributions."""

    logprobs: Tensor
    """[R] float32"""
    ranks: Tensor
    """[R] int32, from 1."""
    top_ids: Tensor
    """[R, top] int32, most likely first."""
    top_logprobs: Tensor
    """[R, top] float32"""


def describe(logits: Tensor, tokens: Tensor, top: int) -> Described:
    """Tokens [R] (int64) within raw logits [R, V], with `top` alternatives each."""
    normalizer = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, tokens[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > own) | ((logits == own) & (ids < tokens[:, None]))
    top_logits, top_ids = largest(logits, top)
    return Described(
        logprobs=(own - normalizer)[:, 0],
        ranks=(ahead.sum(1) + 1).int(),
        top_ids=top_ids.int(),
        top_logprobs=top_logits - normalizer,
    )


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row and their ids, equal ones by id (torch.topk promises no order)."""
    if count == 0:
        return logits[:, :0], torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    values, ids = logits.topk(min(count + 1, logits.shape[1]), dim=1)
    if values.shape[1] > count and bool((values[:, count - 1] == values[:, count]).any()):
        values, ids = logits.sort(dim=1, descending=True, stable=True)
    else:
        by_id = ids.argsort(dim=1)
        values, order = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, by_id).gather(1, order)
    return values[:, :count], ids[:, :count]


def describe_prompt(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, top: int, vocab: int
) -> Described:
    """`describe` for the tokens [L] that follow hidden states [L, H], in blocks of bounded memory."""
    rows = max(1, BLOCK_BYTES // (4 * vocab))
    parts = [
        describe(logits_of(hidden[start : start + rows]), tokens[start : start + rows], top)
        for start in range(0, len(tokens), rows)
    ]
    return Described(
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )
