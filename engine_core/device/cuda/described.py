"""Logprobs on the GPU without waiting for it: computed behind the forward, copied to pinned memory, packed when read.

Owns the device half of `worker/logprobs.py`'s meaning: natural logarithms of the raw distribution, ranks from 1.
Alternatives of exactly equal logit stand in no particular order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_core.device.base import PromptRows
from engine_core.step import LogprobBlock, PromptLogprobBlock

BLOCK_ROWS = 128
"""Prompt positions whose logits exist at once."""


@dataclass(frozen=True, slots=True)
class _Pinned:
    """Columns of R described tokens, on their way to the host."""

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


@dataclass(frozen=True, slots=True)
class PinnedLogprobs:
    """Sampled rows' logprobs; readable once the lane's completion is proven."""

    rows: npt.NDArray[np.int64]
    tops: npt.NDArray[np.int32]
    columns: _Pinned

    def block(self) -> LogprobBlock:
        keep = np.arange(self.columns.top_ids.shape[1]) < self.tops[:, None]
        return LogprobBlock(
            rows=self.rows.astype("<u4").tobytes(),
            sampled=self.columns.logprobs.numpy().tobytes(),
            ranks=self.columns.ranks.numpy().tobytes(),
            counts=self.tops.astype("<u4").tobytes(),
            top_ids=self.columns.top_ids.numpy()[keep].tobytes(),
            top_logprobs=self.columns.top_logprobs.numpy()[keep].tobytes(),
        )


@dataclass(frozen=True, slots=True)
class PinnedPrompt:
    """A chunk's prompt logprobs; readable once its completion is proven."""

    rows: PromptRows
    blocks: list[_Pinned]

    def block(self) -> PromptLogprobBlock:
        def joined(name: str) -> bytes:
            return b"".join(getattr(block, name).numpy().tobytes() for block in self.blocks)

        return PromptLogprobBlock(
            slot=self.rows.slot,
            start=self.rows.start + 1,
            logprobs=joined("logprobs"),
            ranks=joined("ranks"),
            top=self.rows.top,
            top_ids=joined("top_ids"),
            top_logprobs=joined("top_logprobs"),
        )


def describe(
    raw: torch.Tensor, tokens: torch.Tensor, rows: npt.NDArray[np.int64], tops: npt.NDArray[np.int32]
) -> PinnedLogprobs:
    """Drawn tokens int32 [R] within raw logits [R, V]; enqueues on the current stream."""
    return PinnedLogprobs(rows, tops, _columns(raw, tokens, int(tops.max())))


def describe_prompt(
    head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, rows: PromptRows
) -> PinnedPrompt:
    """Prompt tokens that follow `hidden` [R, H], in blocks; enqueues on the current stream."""
    targets = torch.from_numpy(rows.targets.astype(np.int32)).pin_memory().to(hidden.device, non_blocking=True)
    blocks = [
        _columns(head(hidden[at : at + BLOCK_ROWS].clone()), targets[at : at + BLOCK_ROWS], rows.top)
        for at in range(0, len(rows.targets), BLOCK_ROWS)
    ]
    return PinnedPrompt(rows, blocks)


def _columns(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> _Pinned:
    normalizer = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, tokens.long().clamp(min=0)[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (logits > own) | ((logits == own) & (ids < tokens[:, None]))
    values, indices = logits.topk(top, dim=1)
    return _Pinned(
        _to_host((own - normalizer)[:, 0]),
        _to_host((ahead.sum(1) + 1).int()),
        _to_host(indices.int()),
        _to_host(values - normalizer),
    )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
