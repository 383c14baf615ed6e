"""Sampling on the device: parameters in tables by slot, four launches a step, the token left where decode reads it.

Owns the tables' layout and the launches; sampling.cu says what each parameter does. Logprobs are of the raw logits and
must be taken before: the logits are changed in place.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_core.ops.cuda.kernel import Argument, Kernel, Kernels, address, require
from engine_core.ops.masks import mask_size
from engine_core.request import MAX_LOGIT_BIAS, MAX_STOP_IDS
from engine_core.step import RowSampling

PIECE = 2048
"""Candidates that one block scores."""
SCORE_THREADS = 256
PICK_THREADS = 512
EDIT_THREADS = 128
LIKELY_BYTES = 16 + 8 * PICK_THREADS
MAX_SUPPRESSED = MAX_STOP_IDS + 128
"""Stop ids and eos ids."""
MAX_EDITS = MAX_LOGIT_BIAS + MAX_SUPPRESSED
ROW = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("top_k", "<i4"),
        ("suppress_until", "<i4"),
        ("seed", "<u8"),
        ("suppressed", "<i4"),
        ("edits", "<i4"),
        ("penalized", "<u4"),
        ("unused", "<u4", 3),
    ]
)
EDIT = np.dtype([("candidate", "<i4"), ("bias", "<f4")])
_SOURCE = "sampling.cu"


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One slot's table entries, ready to be copied: `row` of 64 bytes, `edits` of 8 bytes each."""

    row: npt.NDArray[np.void]
    edits: npt.NDArray[np.void]

    @property
    def penalized(self) -> bool:
        """The row needs its counts filled (`Sampler.count_seen`) before its first draw."""
        return bool(self.row["penalized"][0])


def encode_row(sampling: RowSampling, prompt_len: int) -> RowRecord:
    """A row's parameters as the kernels read them. Raises ValueError if too many ids are suppressed."""
    suppressed = np.frombuffer(sampling.suppress, "<i4") if sampling.min_tokens > 0 else np.empty(0, "<i4")
    if len(suppressed) > MAX_SUPPRESSED:
        raise ValueError(f"{len(suppressed)} ids are suppressed; the table holds {MAX_SUPPRESSED}")
    edits = np.zeros(len(suppressed) + len(sampling.logit_bias), EDIT)
    edits["candidate"][: len(suppressed)] = suppressed
    edits["candidate"][len(suppressed) :] = list(sampling.logit_bias)
    edits["bias"][len(suppressed) :] = list(sampling.logit_bias.values())
    row = np.zeros(1, ROW)
    for name in ("temperature", "top_p", "min_p", "top_k", "seed"):
        row[name] = getattr(sampling, name)
    for name in ("repetition", "presence", "frequency"):
        row[name] = getattr(sampling, f"{name}_penalty")
    row["suppress_until"] = prompt_len + sampling.min_tokens
    row["suppressed"] = len(suppressed)
    row["edits"] = len(edits)
    row["penalized"] = (row["repetition"] != 1) | (row["presence"] != 0) | (row["frequency"] != 0)
    return RowRecord(row, edits)


class SamplingTables:
    """Device tables by slot. `last_token[slot]` is the row's newest token, which its next decode step feeds."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        """Takes slots * vocabulary * 4 bytes for the counts. Raises ValueError for a vocabulary not a multiple of 4."""
        if vocabulary % 4:
            raise ValueError(f"the vocabulary has {vocabulary} ids; it must be a multiple of 4")
        self.vocabulary = vocabulary
        self.rows = torch.zeros(slots, ROW.itemsize, dtype=torch.uint8, device=device)
        self.edits = torch.zeros(slots, MAX_EDITS, EDIT.itemsize, dtype=torch.uint8, device=device)
        self.seen = torch.zeros(slots, vocabulary, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(slots, dtype=torch.int32, device=device)

    def put(self, slot: int, record: RowRecord) -> None:
        """Copy a row's entries at once (the copy is from pageable memory: for tests; serving stages its own)."""
        self.rows[slot] = torch.from_numpy(record.row.view(np.uint8).copy())
        if len(record.edits):
            edits = torch.from_numpy(record.edits.view(np.uint8).reshape(-1, EDIT.itemsize).copy())
            self.edits[slot, : len(record.edits)] = edits


class Sampler:
    """Draws for batches of up to `max_rows` rows. One draw at a time: scratch buffers are shared.

    `masks` (int32) says what rows may draw: for each row of the batch the number of its mask, or -1, then the masks
    (bits as in `ops/masks.py`). What is in it stays until it is written again.
    """

    def __init__(self, tables: SamplingTables, max_rows: int, kernels: Kernels) -> None:
        self.tables = tables
        self._max_rows = max_rows
        self._pieces = -(-tables.vocabulary // PIECE)
        device = tables.rows.device
        self._best_scores = torch.empty(max_rows, self._pieces, dtype=torch.float32, device=device)
        self._best_candidates = torch.empty(max_rows, self._pieces, dtype=torch.int32, device=device)
        masks = max_rows * (1 + mask_size(tables.vocabulary))
        self.masks = torch.full((masks,), -1, dtype=torch.int32, device=device)
        self._likely = torch.zeros(max_rows, LIKELY_BYTES, dtype=torch.uint8, device=device)
        self._edit = kernels.load(Kernel(_SOURCE, "edit_logits"))
        self._score = kernels.load(Kernel(_SOURCE, "score_logits"))
        self._list = kernels.load(Kernel(_SOURCE, "list_likely"))
        self._pick = kernels.load(Kernel(_SOURCE, "pick_token"))
        self._count = kernels.load(Kernel(_SOURCE, "count_seen"))

    def __call__(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """tokens[row] = the draw after the token at positions[row], also left in last_token[slot].

        logits: float32 [rows, vocabulary], changed in place; slots, positions, tokens: int32 [rows]. A row of slot -1
        is left alone. A token is -1, and the tables unchanged, where the row's logits hold NaN or +infinity or leave
        nothing to draw.
        """
        tables, rows = self.tables, logits.shape[0]
        if rows > self._max_rows:
            raise ValueError(f"{rows} rows; this was made for up to {self._max_rows}")
        require(logits, torch.float32, (rows, tables.vocabulary), "logits")
        for tensor, what in ((slots, "slots"), (positions, "positions"), (tokens, "tokens")):
            require(tensor, torch.int32, (rows,), what)
        vocabulary, pieces = ctypes.c_int32(tables.vocabulary), ctypes.c_int32(self._pieces)
        row: list[Argument] = [address(logits), address(slots), address(positions), address(tables.rows)]
        best: list[Argument] = [address(self._best_scores), address(self._best_candidates)]
        edits: list[Argument] = [address(tables.edits), ctypes.c_int32(MAX_EDITS)]
        written: list[Argument] = [address(tokens), address(tables.last_token)]
        self._edit((rows, 1, 1), EDIT_THREADS, [*row, *edits, vocabulary])
        grid, seen, likely = (self._pieces, rows, 1), address(tables.seen), address(self._likely)
        masks: list[Argument] = [address(self.masks), address(self.masks[self._max_rows :])]
        self._score(grid, SCORE_THREADS, [*row, seen, *masks, *best, vocabulary])
        parameters = [address(logits), address(slots), address(tables.rows)]
        self._list(grid, SCORE_THREADS, [*parameters, address(self._best_scores), likely, vocabulary])
        self._pick((rows, 1, 1), PICK_THREADS, [*row, seen, *best, likely, *written, pieces, vocabulary])

    def count_seen(self, slot: int, ids: torch.Tensor, prompt_len: int) -> None:
        """Fill a penalized row's counts. ids: int32 [length], the prompt, then earlier output."""
        require(ids, torch.int32, (None,), "ids")
        for clear, size in ((1, self.tables.vocabulary), (0, ids.shape[0])):
            values = (slot, prompt_len, ids.shape[0], self.tables.vocabulary, clear)
            arguments: list[Argument] = [
                address(self.tables.seen),
                address(ids),
                *(ctypes.c_int32(value) for value in values),
            ]
            self._count((-(-size // SCORE_THREADS), 1, 1), SCORE_THREADS, arguments)
