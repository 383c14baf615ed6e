"""Paged prefill attention: causal chunks with history, by FlashInfer's FA3 kernel under our own schedule.

Owns the pinned and device buffers that planning fills: a plan is one copy from pinned memory, into device buffers whose
addresses never change (a captured run can be replayed after the next plan). Pinned memory is a ring: a plan in ring
slot r may be made once the copies of the last plan in r are proven done. The runs that read a plan must be enqueued
before the next plan, on the same stream. Nothing here waits for the GPU.

A small chunk behind a long history has too few tiles for all SMs. So on a lane with a branch its keys are cut in two
spans, the earlier history and the rest, which two launches attend to side by side; a third merges what they found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine_core.ops.cuda.kernel import Kernels, require
from engine_core.ops.cuda.layer import Heads, MergeSpans
from engine_core.ops.cuda.tiles import FIELDS, Ints, Span, TileSchedule, tile_tokens

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete
_NHD = 0  # FlashInfer's code of the KV layout


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """The most that one plan may hold."""

    rows: int
    tokens: int
    pages: int
    """Entries of the rows' page lists together."""


@dataclass(frozen=True, slots=True)
class LaneSms:
    """Thread blocks of a launch: one for each SM of the card, of which as many run at once as the lane has SMs."""

    card: int
    lane: int


class PagedPrefill:
    """Plans and runs one lane's chunks."""

    def __init__(
        self,
        heads: Heads,
        limits: PrefillLimits,
        scale: float,
        sms: LaneSms,
        kernels: Kernels,
        run: Callable[..., None],
        device: torch.device,
        *,
        rings: int = 1,
        branch: Any = None,
    ) -> None:
        """`run`: FlashInfer's kernel (`flashinfer_kernel.py`); `branch`: a stream for the launch beside the lane's own,
        without which no chunk is cut."""
        self._heads = heads
        self._limits = limits
        self._scale = scale
        self._branch = branch
        self._most_cut = 0 if branch is None else sms.lane // 2 // heads.query * tile_tokens(heads)
        """Tokens whose tiles leave half of the SMs idle."""
        self._schedules = [
            TileSchedule(heads, limits.rows, tokens, grid=sms.card, sms=sms.lane)
            for tokens in (limits.tokens, self._most_cut)
        ]
        whole, earlier = self._schedules
        words = whole.words + earlier.words + limits.pages
        self._on_device = torch.zeros(words, dtype=torch.int32, device=device)
        self._pages = self._on_device[whole.words + earlier.words :]
        self._pinned = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(rings)]
        shape = (self._most_cut, heads.query)
        self._earlier_out = torch.zeros(*shape, heads.head_dim, dtype=torch.bfloat16, device=device)
        self._lse, self._earlier_lse = torch.zeros(2, *shape, dtype=torch.float32, device=device)
        self._merge = MergeSpans(heads, kernels)
        self._run = run

    def _cuts(self, bucket: int) -> bool:
        """Whether so many tokens attend to their keys in two spans."""
        return bucket <= self._most_cut

    def plan(
        self, starts: Sequence[int], lengths: Sequence[int], pages: Sequence[Ints], ring: int = 0, *, bucket: int
    ) -> None:
        """Plan chunks: row r's `lengths[r]` query tokens at positions starts[r] .., its pages in order of position.

        `bucket`: tokens of the run that will read it. Enqueues a copy from ring slot `ring` on torch's current stream.
        Raises ValueError beyond limits.
        """
        limits, size = self._limits, self._heads.page_size
        tokens = np.array(lengths, np.int64)
        if len(tokens) > limits.rows or tokens.sum() > min(limits.tokens, bucket):
            raise ValueError(f"{len(tokens)} rows of {tokens.sum()} tokens; the limits are {limits} and {bucket}")
        history = np.array(starts, np.int64)[: len(tokens)]
        counts = -(-(history + tokens) // size)
        total = int(counts.sum())
        if total > limits.pages:
            raise ValueError(f"{total} pages; the limits are {limits}")
        words = self._pinned[ring].numpy()
        firsts = np.cumsum(counts) - counts
        cut = np.minimum(history, (history + tokens // 2) // 2) // size if self._cuts(bucket) else 0 * history
        whole, earlier = self._schedules
        whole.fill(words[: whole.words], tokens, Span(firsts + cut, history + tokens - size * cut, causal=True))
        if self._cuts(bucket):
            earlier.fill(words[whole.words :], tokens, Span(firsts, size * cut, causal=False))
        used = whole.words + earlier.words + total
        if total:
            lists = [page_list[:count] for page_list, count in zip(pages, counts.tolist(), strict=True)]
            np.concatenate(lists, out=words[used - total : used])
        self._on_device[:used].copy_(self._pinned[ring][:used], non_blocking=True)

    def run(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of the planned chunks, rows' tokens one after another.

        q, out: bf16 [bucket, query heads, head_dim], the planned bucket; kv: bf16 [pages, 2, page_size, kv heads,
        head_dim], the chunks' own tokens included.
        """
        heads, tokens = self._heads, q.shape[0]
        require(out, torch.bfloat16, (tokens, heads.query, heads.head_dim), "out")
        require(kv, torch.bfloat16, (None, 2, heads.page_size, heads.kv, heads.head_dim), "kv")
        if not self._cuts(tokens):
            self._launch(0, q, kv, out, None)
            return
        other, other_lse, lse = self._earlier_out[:tokens], self._earlier_lse[:tokens], self._lse[:tokens]
        home = _cuda.current_stream()
        self._branch.wait_stream(home)
        try:
            with _cuda.stream(self._branch):
                self._launch(1, q, kv, other, other_lse)
            self._launch(0, q, kv, out, lse)
        finally:
            home.wait_stream(self._branch)  # so what proves the lane idle proves this too, whatever failed (rule O2)
        self._merge(other, other_lse, out, lse)

    def _launch(
        self, span: int, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """One of the schedules: 0, causal, or 1, the earlier span."""
        words = self._on_device
        first = self._schedules[0].words if span else 0
        places = [4 * (first + self._schedules[span].places[name]) for name in FIELDS]
        one_schedule_for_all_heads, causal = 0, int(span == 0)
        self._run(
            *(words, words, [*places, one_schedule_for_all_heads], q, kv[:, 0], kv[:, 1]),
            *(words, words, self._pages, words),  # ends of queries and pages, page list, last pages: it reads the third
            *(out, lse, causal, _NHD, -1, False),  # no window, no launch overlap
            *(None, None, None),  # no prompts of several items
            *(None, 0.0, self._scale, 1.0, 0),  # no scale of the values by head, no soft cap, none of the values at all
        )
