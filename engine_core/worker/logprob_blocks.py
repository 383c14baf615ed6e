"""Logprobs as results carry them: columns of bytes, row after row.

Owns the cut between the decode rows of a step and the chunks that shared its forward.
"""

from __future__ import annotations

import numpy as np

from engine_core.step import LogprobBlock


def split_logprobs(block: LogprobBlock | None, at: int) -> tuple[LogprobBlock | None, LogprobBlock | None]:
    """The block's rows before sampled row `at`, and the others counted from there; None for an empty part."""
    if block is None:
        return None, None
    rows = np.frombuffer(block.rows, "<u4")
    counts = np.frombuffer(block.counts, "<u4")
    cut = int(np.searchsorted(rows, at))
    tops = 4 * int(counts[:cut].sum())
    head = LogprobBlock(
        block.rows[: 4 * cut],
        block.sampled[: 4 * cut],
        block.ranks[: 4 * cut],
        block.counts[: 4 * cut],
        block.top_ids[:tops],
        block.top_logprobs[:tops],
    )
    tail = LogprobBlock(
        (rows[cut:] - np.uint32(at)).astype("<u4").tobytes(),
        block.sampled[4 * cut :],
        block.ranks[4 * cut :],
        block.counts[4 * cut :],
        block.top_ids[tops:],
        block.top_logprobs[tops:],
    )
    return head if cut else None, tail if cut < len(rows) else None
