"""How prefill attention is cut into tiles and dealt out to thread blocks: plain arithmetic, checked without a GPU.

Owns the arrays that FlashInfer's FA3 kernel takes its work from (flashinfer-python is pinned): block b works through
the tiles ends[b] .. ends[b + 1]. The library's own planner deals out to every SM of the card. On a lane that has fewer,
blocks run in turns, and what the last turn leaves idle can be a quarter of the time; and it costs the host more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_core.ops.cuda.layer import Heads

Ints = npt.NDArray[np.int32]
FIELDS = ("tile", "first_query", "first_page", "queries", "keys", "head", "ends", "row")
"""In the order in which the kernel's caller wants their places."""
ALIGNMENT = 4
"""Words; 16 bytes."""
TILE_COST = 256
"""Keys that a tile's fixed work is worth."""


@dataclass(frozen=True, slots=True)
class Span:
    """Keys that rows' queries attend to: row r's `keys[r]` keys, in its pages from `first_page[r]` of the page list on.

    `causal`: the last key is the last query's own, and a query sees none behind its own; else all see all.
    """

    first_page: npt.NDArray[np.integer[Any]]
    keys: npt.NDArray[np.integer[Any]]
    causal: bool


class TileSchedule:
    """Work lists of one launch, in a buffer of int32 words whose places never change."""

    def __init__(self, heads: Heads, most_rows: int, most_tokens: int, *, grid: int, sms: int) -> None:
        """`grid`: blocks that are launched, one for each SM of the card; `sms`: those of them that run at once."""
        self._heads = heads
        self._grid = grid
        self._sms = sms
        self.tile = tile_tokens(heads)
        self._capacity = (-(-most_tokens // self.tile) + most_rows - 1) * heads.query
        self.places: dict[str, int] = {}
        """First word of each field."""
        self.words = 0
        for name in FIELDS:
            self.places[name] = self.words
            size = grid + 1 if name == "ends" else self._capacity
            self.words += -(-size // ALIGNMENT) * ALIGNMENT

    def fill(self, words: Ints, lengths: npt.NDArray[np.integer[Any]], span: Span) -> None:
        """Row r's lengths[r] queries, one row's behind the other's. Raises ValueError for more than fits."""
        counts = -(-lengths // self.tile)
        row = np.repeat(np.arange(len(lengths)), counts)
        tile = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        keys = span.keys[row]
        reach = np.minimum(keys, (tile + 1) * self.tile + keys - lengths[row]) if span.causal else keys
        longest = np.argsort(-reach, kind="stable")
        # Neighbours in the list run at the same time: they share a kv head's keys, in the second-level cache.
        heads = np.arange(self._heads.query).reshape(self._heads.kv, 1, -1)
        shape = (self._heads.kv, len(row), self._heads.query // self._heads.kv)
        item, head = (np.broadcast_to(part, shape).ravel() for part in (longest[:, None], heads))
        if len(item) > self._capacity:
            raise ValueError(f"{len(item)} tiles; there is room for {self._capacity}")
        block = deal(reach[item] + TILE_COST, self._sms)
        order = np.argsort(block, kind="stable")
        item, row, places = item[order], row[item[order]], self.places
        firsts = np.cumsum(lengths) - lengths
        for name, values in (
            ("tile", tile[item]),
            ("first_query", firsts[row]),
            ("first_page", span.first_page[row]),
            ("queries", lengths[row]),
            ("keys", span.keys[row]),
            ("head", head[order]),
            ("row", row),
        ):
            words[places[name] : places[name] + len(item)] = values
        ends = words[places["ends"] : places["ends"] + self._grid + 1]
        ends[0] = 0
        np.cumsum(np.bincount(block, minlength=self._grid), out=ends[1:])


def tile_tokens(heads: Heads) -> int:
    """Queries of a tile: the kernel's own choice by head_dim."""
    return 192 if heads.head_dim == 64 else 128


def deal(costs: npt.NDArray[np.integer[Any]], blocks: int) -> npt.NDArray[np.int64]:
    """The block of each piece of work: taken in rounds of one a block, the costliest to the block with least so far."""
    out, loads = np.empty(len(costs), np.int64), np.zeros(blocks, np.int64)
    for first in range(0, len(costs), blocks):
        part = costs[first : first + blocks]
        least = np.argsort(loads, kind="stable")[: len(part)]
        costliest = np.argsort(-part, kind="stable")
        out[first + costliest] = least
        loads[least] += part[costliest]
    return out
