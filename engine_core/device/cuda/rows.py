"""What a row brings to the device when it starts: its pages, its sampling parameters, its counts.

Owns the copies of row state into the device's tables by slot. They are rare (once a row), so each takes pinned memory
of its own, which torch's host allocator reuses only after the copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine_core.ops.cuda.sampling import EDIT, Sampler, SamplingTables, encode_row
from engine_core.step import RowStart

Int32 = npt.NDArray[np.int32]


class DeviceRows:
    """Tables by slot. Calls enqueue on torch's current stream: a start on that of the lane that computes the row first,
    appended pages on the primary lane's."""

    def __init__(self, tables: SamplingTables, sampler: Sampler, page_table: torch.Tensor) -> None:
        self._tables = tables
        self._sampler = sampler
        self._page_table = page_table
        self.logprobs = np.full(page_table.shape[0], -1, np.int32)
        """Alternatives asked for, by slot; -1: no logprobs."""

    def start(self, start: RowStart) -> None:
        slot = start.slot
        self.logprobs[slot] = start.sampling.logprobs
        pages = np.frombuffer(start.pages, "<i4")
        self._page_table[slot, : len(pages)].copy_(_pinned(pages), non_blocking=True)
        record = encode_row(start.sampling, start.prompt_len)
        self._tables.rows[slot].copy_(_pinned(record.row.view(np.uint8)), non_blocking=True)
        if len(record.edits):
            edits = record.edits.view(np.uint8).reshape(-1, EDIT.itemsize)
            self._tables.edits[slot, : len(edits)].copy_(_pinned(edits), non_blocking=True)
        if record.penalized:
            ids = _pinned(np.frombuffer(start.ids, "<i4")).to(self._page_table.device, non_blocking=True)
            self._sampler.count_seen(slot, ids, start.prompt_len)

    def append_pages(self, slots: Int32, columns: Int32, pages: Int32) -> None:
        """Pages beyond what a step's staging carries."""
        device = self._page_table.device
        where = tuple(_pinned(index.astype(np.int64)).to(device, non_blocking=True) for index in (slots, columns))
        self._page_table.index_put_(where, _pinned(pages).to(device, non_blocking=True))


def _pinned(values: npt.NDArray[np.generic]) -> torch.Tensor:
    tensor = torch.empty(values.shape, dtype=_DTYPES[values.dtype.str], pin_memory=True)
    tensor.numpy()[...] = values
    return tensor


_DTYPES = {"<i4": torch.int32, "|u1": torch.uint8, "<i8": torch.int64}
