"""Paged attention on a CPU: a pool of keys and values by page, and attention over a ragged batch of rows.

Owns the layout of the pool and the choice between views and copies of it. Allocates no pages and trusts the page tables
it is given (the worker's tables have checked them).

A decode row (one query token) reads its keys and values where they lie when its pages are consecutive. Short rows are
copied into one padded batch instead, because there a call per row costs more than the copy. A chunk of a prompt attends
causally to all that came before it, in blocks of queries, so that no mask grows with chunk x context.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Source = slice | Tensor
"""Where a row's tokens lie in a layer's pool: a run of them, or their indexes [S]."""

COPY_BYTES = 256 << 10
"""A decode row with at most this much KV in a layer joins a padded batch."""
PADDING_TOKENS = 256
"""Padding that a batch of short rows may hold before another batch is cheaper."""
QUERY_BLOCK = 256
"""Queries of a chunk that attend together when earlier tokens are in the cache."""


class PagedKV:
    """Keys and values of every layer, [layers, total_pages * page_size, kv heads, head dim] each.

    Memory is reserved, not touched: a page costs physical memory from its first use on.
    """

    def __init__(
        self, num_layers: int, total_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.page_size = page_size
        shape = (num_layers, total_pages * page_size, kv_heads, head_dim)
        self.keys = _untouched_zeros(shape, dtype)
        self.values = _untouched_zeros(shape, dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.keys[0, 0].nbytes


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the system provides page by page on first use (torch.zeros would write them all).

    Small pages: a request's tokens lie in as many places as there are layers, and the first use of each would clear
    2 MB where huge pages are given (numpy asks for them; measured: 60 ms of a prompt of 16 tokens that takes 120).
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that knows no huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class _Work(Protocol):
    """A part of a batch's attention, the same for every layer."""

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Attend with q [T, Hkv, G, D] over a layer's pool [N, Hkv, D] and write this part's rows of `out`."""


class CpuAttention:
    """The AttentionOp of a CPU worker. `begin` describes a batch; then every layer is called once, in any order."""

    def __init__(self, kv: PagedKV, scale: float) -> None:
        self._kv = kv
        self._scale = scale
        self._band = _CausalBand(kv.keys.dtype)
        self._written = torch.empty(0, dtype=torch.int64)
        self._work: list[_Work] = []

    def begin(self, page_tables: Int32, starts: Int32, lengths: Int32) -> None:
        """Row r computes positions starts[r] .. starts[r] + lengths[r] - 1; its pages are page_tables[r], in order.

        All lengths are at least 1. Tokens of the batch stand in row order; T is the sum of the lengths.
        """
        page = self._kv.page_size
        ends = (starts + lengths).astype(np.int64)
        token_ends = np.cumsum(lengths, dtype=np.int64)
        first_tokens = token_ends - lengths
        rows = np.repeat(np.arange(len(starts)), lengths)
        positions = np.arange(len(rows)) - np.repeat(first_tokens - starts, lengths)
        self._written = torch.from_numpy(_locate(page_tables[rows, positions // page], positions, page))
        short = (lengths == 1) & (ends * self._kv.token_bytes <= COPY_BYTES)
        if np.count_nonzero(short) == 1:
            short[:] = False
        self._work = [
            _PaddedRows.plan(page_tables[group], ends[group], first_tokens[group], page, self._scale)
            for group in _groups(np.flatnonzero(short), ends)
        ]
        consecutive = _consecutive(page_tables, -(-ends // page))
        for row in np.flatnonzero(~short).tolist():
            source = _source(page_tables[row], int(ends[row]), page, bool(consecutive[row]))
            token, length = int(first_tokens[row]), int(lengths[row])
            if length == 1:
                self._work.append(_DecodeRow(token, source, self._scale))
            else:
                self._work.append(_Chunk(token, length, int(starts[row]), source, self._scale, self._band))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        keys.index_copy_(0, self._written, k)
        values.index_copy_(0, self._written, v)
        tokens, heads, dim = q.shape
        kv_heads = keys.shape[1]
        grouped = q.view(tokens, kv_heads, heads // kv_heads, dim)
        out = torch.empty(grouped.shape, dtype=q.dtype)
        for work in self._work:
            work.run(grouped, keys, values, out)
        return out.view(tokens, heads * dim)


# ------------------------------ the kinds of work


@dataclass(frozen=True, slots=True)
class _DecodeRow:
    """One query token over its own tokens in the pool. The query heads of a group are the rows of one product."""

    token: int
    source: Source
    scale: float

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        k, v = _take(keys, self.source).transpose(0, 1), _take(values, self.source).transpose(0, 1)
        query = q[self.token].unsqueeze(0)
        out[self.token] = functional.scaled_dot_product_attention(
            query, k.unsqueeze(0), v.unsqueeze(0), scale=self.scale
        )[0]


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """Decode rows of similar length as one batch, over copies of their tokens padded to the longest.

    Padding repeats a row's own first token: whatever stale values the pool holds elsewhere, they can't reach a product.
    """

    tokens: Tensor
    index: Tensor
    """[B * S] in the pool."""
    mask: Tensor | None
    """[B, 1, 1, S]: 0 or -inf."""
    scale: float

    @staticmethod
    def plan(page_tables: Int32, ends: Int64, tokens: Int64, page: int, scale: float) -> _PaddedRows:
        positions = np.arange(int(ends.max()))[None, :]
        inside = positions < ends[:, None]
        positions = np.where(inside, positions, 0)
        index = _locate(np.take_along_axis(page_tables, positions // page, 1), positions, page)
        mask = None if inside.all() else torch.from_numpy(np.where(inside, 0.0, -np.inf))[:, None, None, :]
        return _PaddedRows(torch.from_numpy(tokens), torch.from_numpy(index.reshape(-1)), mask, scale)

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        shape = (len(self.tokens), -1, *keys.shape[1:])
        k = keys.index_select(0, self.index).view(shape).transpose(1, 2)
        v = values.index_select(0, self.index).view(shape).transpose(1, 2)
        query = q.index_select(0, self.tokens)
        mask = None if self.mask is None else self.mask.to(q.dtype)
        out[self.tokens] = functional.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=self.scale)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive positions of one prompt: causal among themselves, and over everything before them."""

    token: int
    length: int
    start: int
    source: Source
    scale: float
    band: _CausalBand

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        query = q[self.token : self.token + self.length].permute(1, 2, 0, 3)
        k, v = self._shared(keys, query), self._shared(values, query)
        target = out[self.token : self.token + self.length].permute(1, 2, 0, 3)
        if self.start == 0:
            target.copy_(functional.scaled_dot_product_attention(query, k, v, is_causal=True, scale=self.scale))
            return
        for first in range(0, self.length, QUERY_BLOCK):
            block = slice(first, min(first + QUERY_BLOCK, self.length))
            seen = self.start + block.stop
            mask = self.band.mask(block.stop - block.start, seen)
            target[:, :, block] = functional.scaled_dot_product_attention(
                query[:, :, block], k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=self.scale
            )

    def _shared(self, pool: Tensor, query: Tensor) -> Tensor:
        """[Hkv, G, S, D]: each kv head's tokens, the same memory for all query heads of its group."""
        tokens = _take(pool, self.source).transpose(0, 1)
        return tokens.unsqueeze(1).expand(-1, query.shape[1], -1, -1)


class _CausalBand:
    """Causal masks of chunks that follow earlier tokens, as views of one matrix that grows with the context.

    Row i of the matrix allows columns up to `past` + i; a mask of b queries over s tokens is its window in which query
    i sees the first s - b + i + 1 tokens.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._past = 0
        self._matrix = torch.empty(0)

    def mask(self, queries: int, seen: int) -> Tensor:
        """[queries, seen] of 0 and -inf: the last `queries` of `seen` tokens attend causally."""
        past = seen - queries
        if past > self._past or len(self._matrix) == 0:
            self._past = max(1024, 1 << past.bit_length())
            full = torch.full((QUERY_BLOCK, self._past + QUERY_BLOCK), -torch.inf, dtype=self._dtype)
            self._matrix = full.triu_(self._past + 1)
        return self._matrix[:queries, self._past - past : self._past + queries]


# ------------------------------ where tokens lie


def _locate(pages: npt.NDArray[np.signedinteger], positions: Int64, page: int) -> Int64:
    """Pool indexes of tokens at `positions` of rows in which they lie on `pages`."""
    return pages.astype(np.int64) * page + positions % page


def _consecutive(page_tables: Int32, counts: Int64) -> npt.NDArray[np.bool_]:
    """Whether a row's first counts[r] pages have consecutive ids."""
    longest = int(counts.max())
    steps = np.diff(page_tables[:, :longest], axis=1) == 1
    beyond = np.arange(1, longest)[None, :] >= counts[:, None]
    return np.asarray((steps | beyond).all(axis=1))


def _source(pages: Int32, tokens: int, page: int, consecutive: bool) -> Source:
    if consecutive:
        first = int(pages[0]) * page
        return slice(first, first + tokens)
    positions = np.arange(tokens)
    return torch.from_numpy(_locate(pages[positions // page], positions, page))


def _take(pool: Tensor, source: Source) -> Tensor:
    """Tokens [S, Hkv, D]: a view of the pool for a run, else a copy."""
    return pool[source] if isinstance(source, slice) else pool.index_select(0, source)


def _groups(rows: Int64, ends: Int64) -> list[Int64]:
    """The rows in groups of similar length: a group's padding stays below PADDING_TOKENS."""
    groups: list[Int64] = []
    ordered = rows[np.argsort(-ends[rows], kind="stable")]
    while len(ordered):
        padding = np.cumsum(ends[ordered[0]] - ends[ordered])
        size = int(np.searchsorted(padding, PADDING_TOKENS, side="right"))
        groups.append(ordered[:size])
        ordered = ordered[size:]
    return groups
