"""Paged prefill attention: causal chunks with history, through FlashInfer.

Owns the pinned and device buffers that planning fills, so that a plan copies from pinned memory alone and its device
buffers keep their addresses (a captured run can be replayed after the next plan). One `PagedPrefill` is one staging
slot: it must not be planned again before the copies of its last plan are done (record an event after `plan`), nor
before the runs that read that plan are. Nothing here waits for the GPU.

What a plan copies, all asynchronously on torch's current stream: the page list (here), the three index arrays and the
lengths (FlashInfer), and up to 8 MiB of scheduling data from FlashInfer's own pinned workspace, one per instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

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


class PagedPrefill:
    """Plans and runs one staging slot's chunks."""

    def __init__(
        self,
        heads: Heads,
        limits: PrefillLimits,
        scale: float,
        workspace: torch.Tensor,
        backend: Backend,
    ) -> None:
        """`workspace`: uint8 on the device (128 MiB or more), free to be shared by whatever runs on the same lane."""
        self._heads = heads
        self._limits = limits
        self._scale = scale
        rows = limits.rows
        device = workspace.device

        def pinned(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, pin_memory=True)

        def on_device(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._query_ends, self._page_ends = pinned(rows + 1), pinned(rows + 1)
        self._last_page, self._lengths = pinned(rows), pinned(rows)
        self._pages, self._device_pages = pinned(limits.pages), on_device(limits.pages)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=on_device(rows + 1),
            paged_kv_indptr_buf=on_device(rows + 1),
            paged_kv_indices_buf=self._device_pages,
            paged_kv_last_page_len_buf=on_device(rows),
            backend=backend.value,
        )
        self.plan(
            [0] * rows, [limits.tokens] + [0] * (rows - 1), [np.zeros(limits.pages, np.int32)] + [_NONE] * (rows - 1)
        )

    def plan(self, starts: Sequence[int], lengths: Sequence[int], pages: Sequence[Ints]) -> None:
        """Plan chunks: row r's `lengths[r]` query tokens at positions starts[r] .., its pages in order of position.

        Fewer rows than the limit are padded. Enqueues copies on the current stream. Raises ValueError beyond limits.
        """
        heads, limits = self._heads, self._limits
        if len(lengths) > limits.rows or sum(lengths) > limits.tokens:
            raise ValueError(f"{len(lengths)} rows of {sum(lengths)} tokens; the limits are {limits}")
        count = self._fill(starts, lengths, pages)
        self._device_pages[:count].copy_(self._pages[:count], non_blocking=True)
        self._wrapper.plan(
            self._query_ends,
            self._page_ends,
            self._device_pages[:count],
            self._last_page,
            heads.query,
            heads.kv,
            heads.head_dim,
            heads.page_size,
            causal=True,
            sm_scale=self._scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
            seq_lens=self._lengths,
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

    def _fill(self, starts: Sequence[int], lengths: Sequence[int], pages: Sequence[Ints]) -> int:
        """Write the pinned arrays; returns the number of pages."""
        size, rows = self._heads.page_size, self._limits.rows
        query_ends, page_ends = self._query_ends.numpy(), self._page_ends.numpy()
        last_page, context = self._last_page.numpy(), self._lengths.numpy()
        page_ids = self._pages.numpy()
        query_end = page_end = 0
        for row in range(rows):
            length = lengths[row] if row < len(lengths) else 0
            end = starts[row] + length if length else 0
            needed = -(-end // size)
            if page_end + needed > self._limits.pages:
                raise ValueError(f"more than {self._limits.pages} pages")
            if needed:
                page_ids[page_end : page_end + needed] = pages[row][:needed]
            query_end, page_end = query_end + length, page_end + needed
            query_ends[row + 1], page_ends[row + 1] = query_end, page_end
            last_page[row] = end - size * (needed - 1) if needed else 0
            context[row] = end
        return page_end


_NONE = np.empty(0, np.int32)
