"""Paged CPU attention, rotary tables and norms against their slow definitions in `ops/reference.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine_core.model_config import RopeConfig
from engine_core.models.layers import RotaryTable, TorchOps, rotary_frequencies
from engine_core.ops import attention, reference
from engine_core.ops.attention import CpuAttention, PagedKV

Table = npt.NDArray[np.int64]
HEADS, KV_HEADS, DIM, PAGE = 6, 2, 8, 4
SCALE = 0.3


class Case:
    """Rows of given lengths over a pool; the last `new[r]` tokens of row r are computed in one call."""

    def __init__(self, starts: list[int], new: list[int], tables: Table, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tables = tables.astype(np.int32)
        self.starts, self.new = np.array(starts, np.int32), np.array(new, np.int32)
        self.kv = PagedKV(2, int(tables.max()) + 1, PAGE, KV_HEADS, DIM, torch.float32)
        self.attention = CpuAttention(self.kv, SCALE)
        self.keys, self.values = (
            [
                torch.randn(start + count, KV_HEADS, DIM, generator=generator)
                for start, count in zip(starts, new, strict=True)
            ]
            for _ in range(2)
        )
        for row, start in enumerate(starts):
            for position in range(start):
                where = self.tables[row, position // PAGE] * PAGE + position % PAGE
                self.kv.keys[1, where] = self.keys[row][position]
                self.kv.values[1, where] = self.values[row][position]
        self.q = torch.randn(sum(new), HEADS, DIM, generator=generator)

    def run(self) -> torch.Tensor:
        def fresh(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([part[start:] for part, start in zip(parts, self.starts, strict=True)])

        self.attention.begin(self.tables, self.starts, self.new)
        return self.attention(1, self.q, fresh(self.keys), fresh(self.values))

    def expected(self) -> torch.Tensor:
        """By the definition, over the pool as the call left it."""
        keys, values = self.kv.keys[1].double().numpy(), self.kv.values[1].double().numpy()
        queries = iter(self.q.double().numpy())
        rows = [
            reference.paged_attention(next(queries), keys, values, self.tables[row].tolist(), PAGE, start + i, SCALE)
            for row, (start, count) in enumerate(zip(self.starts.tolist(), self.new.tolist(), strict=True))
            for i in range(count)
        ]
        return torch.from_numpy(np.stack(rows)).float().flatten(1)


def scattered(rows: int, pages: int) -> Table:
    return np.random.default_rng(5).permutation(rows * pages).reshape(rows, pages)


def consecutive(rows: int, pages: int) -> Table:
    return np.arange(rows * pages).reshape(rows, pages)


BATCHES = {
    "one decode row": ([9], [1]),
    "first token": ([0], [1]),
    "decode rows": ([3, 0, 17, 30, 4], [1, 1, 1, 1, 1]),
    "whole prompts": ([0, 0, 0], [5, 1, 29]),
    "later chunks": ([8, 3], [20, 2]),
    "all kinds, in any order": ([0, 12, 7, 0, 31, 1], [9, 1, 6, 1, 1, 11]),
}


@pytest.mark.parametrize("copy_bytes", [0, 1 << 20], ids=["views", "copies"])
@pytest.mark.parametrize("layout", [scattered, consecutive])
@pytest.mark.parametrize("name", BATCHES)
def test_agrees_with_the_definition(
    name: str, layout: Callable[[int, int], Table], copy_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a row reads or writes a wrong place of the pool, or attends to too much or too little."""
    monkeypatch.setattr(attention, "COPY_BYTES", copy_bytes)
    monkeypatch.setattr(attention, "PADDING_TOKENS", 20)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 7)
    starts, new = BATCHES[name]
    case = Case(starts, new, layout(len(starts), 8))
    found = case.run()
    torch.testing.assert_close(found, case.expected(), atol=1e-5, rtol=1e-5)


def test_other_layers_and_rows_are_left_alone() -> None:
    """Red when a write lands in another layer or on a page that belongs to nobody in the batch."""
    case = Case([4, 0], [3, 2], scattered(4, 8)[:2])
    case.run()
    assert not case.kv.keys[0].any()
    own = {int(page) for row, end in enumerate((7, 2)) for page in case.tables[row, : -(-end // PAGE)]}
    foreign = [page for page in range(len(case.kv.keys[1]) // PAGE) if page not in own]
    assert not case.kv.values[1].view(-1, PAGE, KV_HEADS, DIM)[foreign].any()


def test_masks_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a chunk beyond the first mask's width reuses it."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 4)
    tables = consecutive(1, 600)
    for start in (5, 900, 2300):
        case = Case([start], [6], tables, seed=start)
        torch.testing.assert_close(case.run(), case.expected(), atol=1e-5, rtol=1e-5)
    band = attention._CausalBand(torch.float32)
    for queries, seen in ((3, 10), (4, 3000), (2, 2), (4, 1030)):
        mask = band.mask(queries, seen)
        allowed = torch.ones(queries, seen).tril(seen - queries).bool()
        assert torch.equal(mask == 0, allowed)
        assert torch.equal(mask == -torch.inf, ~allowed)


def test_memory_is_reserved_not_touched() -> None:
    """Red when the pool is written at start: a gigabyte of it would then be resident before the first request."""
    with open("/proc/self/statm", encoding="ascii") as file:
        before = int(file.read().split()[1])
    kv = PagedKV(4, 4096, 16, 8, 128, torch.bfloat16)
    with open("/proc/self/statm", encoding="ascii") as file:
        after = int(file.read().split()[1])
    assert kv.keys.nbytes == 4 * 4096 * 16 * 8 * 128 * 2
    assert (after - before) * 4096 < kv.keys.nbytes // 8
    assert kv.token_bytes == 2 * 8 * 128 * 2


def test_first_use_takes_small_pages() -> None:
    """Red when the pool asks for huge pages: a token's first use of each layer would then clear 2 MB."""
    kv = PagedKV(4, 4096, 16, 8, 128, torch.bfloat16)
    with open("/proc/self/statm", encoding="ascii") as file:
        before = int(file.read().split()[1])
    kv.keys[:, 4096 * 8] = 1
    with open("/proc/self/statm", encoding="ascii") as file:
        after = int(file.read().split()[1])
    assert (after - before) * 4096 < 2 << 20


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotation_agrees_with_the_definition(kind: str) -> None:
    """Red when halves are paired wrongly, a sign is lost, or heads get each other's norm weight."""
    rope = RopeConfig(theta=500.0, kind=kind, factor=4.0, original_max_position=32)
    table = RotaryTable(rope, DIM, 64, torch.device("cpu"))
    positions = torch.tensor([0, 1, 63, 17])
    generator = torch.Generator().manual_seed(1)
    qk = torch.randn(4, HEADS + KV_HEADS, DIM, generator=generator)
    norm = 1 + 0.3 * torch.randn(HEADS + KV_HEADS, DIM, generator=generator)
    original = qk.double().numpy().copy()
    found = TorchOps().rotate(qk, norm, 1e-6, table.at(positions, torch.float32))
    frequencies, scale = rotary_frequencies(rope, DIM)
    for token, position in enumerate(positions.tolist()):
        for head in range(HEADS + KV_HEADS):
            normed = reference.rms_norm(original[token, head], norm[head].double().numpy(), 1e-6)
            expected = reference.rotate(normed, position, frequencies.double().numpy(), scale)
            np.testing.assert_allclose(found[token, head].numpy(), expected, atol=2e-5)


def test_added_norm_agrees_with_the_definition() -> None:
    """Red when the residual isn't updated in place or the sum isn't what is normalized."""
    generator = torch.Generator().manual_seed(2)
    x, residual = torch.randn(3, 16, generator=generator), torch.randn(3, 16, generator=generator)
    weight = torch.randn(16, generator=generator)
    total = (x + residual).double().numpy()
    found = TorchOps().add_rms_norm(x, residual, weight, 1e-5)
    np.testing.assert_allclose(residual.numpy(), total, rtol=1e-6)
    np.testing.assert_allclose(found.numpy(), reference.rms_norm(total, weight.double().numpy(), 1e-5), atol=1e-6)
