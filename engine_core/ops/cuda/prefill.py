"""Paged prefill attention: causal chunks with history, through FlashInfer.

Owns the pinned and device buffers that planning fills, so that a plan copies from pinned memory alone and its device
buffers keep their addresses (a captured run can be replayed after the next plan). Pinned memory is a ring: a plan in
ring slot r may be made once the copies of the last plan in r are proven done. The runs that read a plan must be
enqueued before the next plan, on the same stream. Nothing here waits for the GPU.

The first plan goes through FlashInfer's wrapper, which sets everything up; later ones call the wrapper's module
directly, as its `plan` does (flashinfer-python is pinned): the wrapper walks its tensors element by element, which
costs the host more than a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import flashinfer
import numpy as np
import numpy.typing as npt
import torch

from engine_core.ops.cuda.kernel import require
from engine_core.ops.cuda.layer import Heads

Ints = npt.NDArray[np.int32]


class Backend(Enum):
    """FlashInfer's prefill kernels."""

    FA3 = "fa3"
    """FlashAttention 3: Hopper's own instructions."""
    FA2 = "fa2"


def choose_backend(capability: tuple[int, int]) -> Backend:
    """The backend for a compute capability; to be said once at start."""
    return Backend.FA3 if capability[0] == 9 else Backend.FA2


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """The most that one plan may hold."""

    rows: int
    tokens: int
    pages: int
    """Entries of the rows' page lists together."""


@dataclass(frozen=True, slots=True)
class _Pinned:
    """What one plan copies from, on the host. `ends` holds the rows' ends of queries, of pages, and last page fills."""

    ends: torch.Tensor
    lengths: torch.Tensor
    pages: torch.Tensor
    workspace: torch.Tensor
    """uint8: FlashInfer's scheduling data."""


class PagedPrefill:
    """Plans and runs one lane's chunks."""

    def __init__(
        self,
        heads: Heads,
        limits: PrefillLimits,
        scale: float,
        workspace: torch.Tensor,
        backend: Backend,
        rings: int = 1,
    ) -> None:
        """`workspace`: uint8 on the device (128 MiB or more), free to be shared by whatever runs on the same lane."""
        self._heads = heads
        self._limits = limits
        rows, device = limits.rows, workspace.device
        self._ends = torch.zeros(3 * rows + 2, dtype=torch.int32, device=device)
        self._pages = torch.zeros(limits.pages, dtype=torch.int32, device=device)
        queries, pages, last = _columns(self._ends, rows)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=queries,
            paged_kv_indptr_buf=pages,
            paged_kv_indices_buf=self._pages,
            paged_kv_last_page_len_buf=last,
            backend=backend.value,
        )
        scheduling = self._wrapper._pin_memory_int_workspace_buffer
        self._pinned = [
            _Pinned(
                torch.zeros(3 * rows + 2, dtype=torch.int32, pin_memory=True),
                torch.zeros(rows, dtype=torch.int32, pin_memory=True),
                torch.zeros(limits.pages, dtype=torch.int32, pin_memory=True),
                scheduling if ring == 0 else torch.empty_like(scheduling, pin_memory=True),
            )
            for ring in range(rings)
        ]
        self._extra = (-1, False, 0) if backend is Backend.FA2 else ()
        """No fixed split, splitting allowed, no blocks set aside."""
        self._set_up(scale)

    def _set_up(self, scale: float) -> None:
        """The largest plan, through the wrapper: it fixes the kernel and the most rows that later plans may have."""
        heads, limits, pinned = self._heads, self._limits, self._pinned[0]
        none = np.empty(0, np.int32)
        rows = limits.rows - 1
        lengths, pages = [limits.tokens] + [0] * rows, [np.zeros(limits.pages, np.int32)] + [none] * rows
        count = self._fill(pinned, [0] * limits.rows, lengths, pages)
        query_ends, page_ends, last = _columns(pinned.ends, limits.rows)
        self._wrapper.plan(
            query_ends,
            page_ends,
            self._pages[:count],
            last,
            heads.query,
            heads.kv,
            heads.head_dim,
            heads.page_size,
            causal=True,
            sm_scale=scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            seq_lens=pinned.lengths,
        )

    def plan(self, starts: Sequence[int], lengths: Sequence[int], pages: Sequence[Ints], ring: int = 0) -> None:
        """Plan chunks: row r's `lengths[r]` query tokens at positions starts[r] .., its pages in order of position.

        Enqueues copies from ring slot `ring` on torch's current stream. Raises ValueError beyond limits.
        """
        heads, limits, pinned, wrapper = self._heads, self._limits, self._pinned[ring], self._wrapper
        if len(lengths) > limits.rows or sum(lengths) > limits.tokens:
            raise ValueError(f"{len(lengths)} rows of {sum(lengths)} tokens; the limits are {limits}")
        count = self._fill(pinned, starts, lengths, pages)
        self._ends.copy_(pinned.ends, non_blocking=True)
        self._pages[:count].copy_(pinned.pages[:count], non_blocking=True)
        wrapper._qo_indptr_last = sum(lengths)
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            pinned.workspace,
            *_columns(pinned.ends, limits.rows)[:2],
            pinned.lengths,
            limits.tokens,
            limits.rows,
            heads.query,
            heads.kv,
            heads.page_size,
            True,  # a captured run must stay valid
            heads.head_dim,
            heads.head_dim,
            True,  # causal
            -1,  # no sliding window
            *self._extra,
        )

    def run(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of the planned chunks, rows' tokens one after another.

        q, out: bf16 [tokens, query heads, head_dim] with the planned number of tokens (while capturing, plan the bucket
        in full); kv: bf16 [pages, 2, page_size, kv heads, head_dim], the chunks' own tokens included.
        """
        heads = self._heads
        require(out, torch.bfloat16, (q.shape[0], heads.query, heads.head_dim), "out")
        require(kv, torch.bfloat16, (None, 2, heads.page_size, heads.kv, heads.head_dim), "kv")
        self._wrapper.run(q, kv, out=out)

    def _fill(self, pinned: _Pinned, starts: Sequence[int], lengths: Sequence[int], pages: Sequence[Ints]) -> int:
        """Write the pinned arrays, padded to the limit of rows; returns the number of pages."""
        size, rows, given = self._heads.page_size, self._limits.rows, len(lengths)
        tokens, contexts = np.zeros((2, rows), np.int32)
        tokens[:given] = lengths
        contexts[:given] = np.where(tokens[:given] > 0, tokens[:given] + np.asarray(starts, np.int32)[:given], 0)
        counts = -(-contexts // size)
        total = int(counts.sum())
        if total > self._limits.pages:
            raise ValueError(f"{total} pages; the limits are {self._limits}")
        ends = pinned.ends.numpy()
        np.cumsum(tokens, out=ends[1 : rows + 1])
        np.cumsum(counts, out=ends[rows + 2 : 2 * rows + 2])
        ends[2 * rows + 2 :] = contexts - size * np.maximum(counts - 1, 0)
        pinned.lengths.numpy()[:] = contexts
        if given:
            lists = [page_list[:count] for page_list, count in zip(pages[:given], counts[:given].tolist(), strict=True)]
            np.concatenate(lists, out=pinned.pages.numpy()[:total])
        return total


def _columns(ends: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the rows' ends of queries and of pages, each behind a 0, and of the fills of their last pages."""
    return ends[: rows + 1], ends[rows + 1 : 2 * rows + 2], ends[2 * rows + 2 :]
