"""Stream-K products on the CPU, against float32, and the kernels that add up their parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_core.ops.cuda import reference
from engine_core.ops.cuda.layer import AddRmsNorm, Heads, RopeAndStore, SiluMul, rope_table
from engine_core.ops.cuda.streamk import (
    RING_BYTES,
    TOKEN_TILES,
    Cut,
    Parts,
    StreamKLinear,
    choose_cut,
    most_parts,
)
from tests.emulated import EmulatedKernels
from tests.emulated.comparing import BF16, assert_near, integers, poisoned, random

COLUMNS = 384
"""Six chunks of 64, three of 128."""
OUTPUTS = 300
"""Two tiles of 128, or four of 64, and one that isn't full."""


def added_up(parts: Parts) -> torch.Tensor:
    """The product: each tile's parts, and no more of them than it has."""
    tokens, outputs = parts.shape
    total = -(-outputs // parts.tile) * parts.chunks
    y = torch.empty(tokens, outputs)
    for tile in range(-(-outputs // parts.tile)):
        first, last = (
            ((chunk + 1) * parts.blocks - 1) // total for chunk in (tile * parts.chunks, (tile + 1) * parts.chunks - 1)
        )
        columns = slice(tile * parts.tile, (tile + 1) * parts.tile)
        y[:, columns] = parts.sums[: last - first + 1, :, columns].sum(0)
    return y


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch leaves unwritten of a temporary is seen."""
    real = torch.empty

    def empty(*shape: int, **options: object) -> torch.Tensor:
        made: torch.Tensor = real(*shape, **options)  # type: ignore[call-overload]
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.parametrize("tokens", [1, 13, 24, 40, 64])
@pytest.mark.parametrize(("sms", "blocks"), [(1, 1), (2, 2), (4, 4), (5, 5), (7, 7), (99, 9), (100, 15)])
def test_any_number_of_blocks_and_rows(kernels: EmulatedKernels, tokens: int, sms: int, blocks: int) -> None:
    """Red if a chunk is left out or taken twice, a part lands at another's place, or a fragment's columns are off."""
    weight, x = random(OUTPUTS, COLUMNS, scale=0.1), random(tokens, COLUMNS)
    parts = StreamKLinear(weight, kernels)(x, sms)
    assert parts.blocks == blocks
    assert_near(added_up(parts), x.float() @ weight.float().T, bound=1e-5)


@pytest.mark.parametrize("cut", [Cut(1, 1, 64, 3), Cut(2, 1, 128, 4), Cut(1, 2, 64, 5), None])
@pytest.mark.parametrize("whole", [False, True])
def test_any_cut(kernels: EmulatedKernels, cut: Cut, whole: bool) -> None:
    """Red if the ring is read before it is written, or two warps of a row lose or double each other's sums."""
    weight, x = random(OUTPUTS, COLUMNS, scale=0.1), random(11, COLUMNS)
    parts = StreamKLinear(weight, kernels, cut, whole=whole)(x, 4)
    product = parts.sums[0] if whole else added_up(parts)
    assert_near(product, x.float() @ weight.float().T, bound=1e-5)


def test_a_vocabulary_of_any_size(kernels: EmulatedKernels) -> None:
    """Red if a head is held to what only those need who add up parts."""
    weight, x = random(131, COLUMNS, scale=0.1), random(11, COLUMNS)
    logits = StreamKLinear(weight, kernels, whole=True)(x, 2).sums[0]
    assert_near(logits, x.float() @ weight.float().T, bound=1e-5)


@pytest.mark.parametrize("cut", [Cut(1, 1, 64, 3), Cut(1, 2, 64, 5), Cut(2, 1, 128, 4)])
def test_a_stage_is_filled_when_its_products_are_done(tmp_path: Path, cut: Cut) -> None:
    """Red if the ring is a stage too short for the products in flight, or sums are left before they are there."""
    weight, x = random(OUTPUTS, 2 * COLUMNS, scale=0.1), random(20, 2 * COLUMNS)
    parts = StreamKLinear(weight, EmulatedKernels(tmp_path, late_products=True), cut)(x, 3)
    assert_near(added_up(parts), x.float() @ weight.float().T, bound=1e-5)


def test_more_blocks_than_chunks_are_not_launched(kernels: EmulatedKernels) -> None:
    """Red if a block without a chunk counts as a part."""
    weight, x = random(128, 128, scale=0.1), random(3, 128)
    parts = StreamKLinear(weight, kernels)(x, 132)
    assert parts.blocks == 2
    assert_near(added_up(parts), x.float() @ weight.float().T, bound=1e-5)


def test_a_row_of_nan_stays_in_its_row(kernels: EmulatedKernels) -> None:
    """Red if a padding row's content reaches a real row."""
    weight, x = random(OUTPUTS, COLUMNS, scale=0.1), random(9, COLUMNS)
    x[4] = torch.nan
    product = added_up(StreamKLinear(weight, kernels)(x, 5))
    real = [row for row in range(9) if row != 4]
    assert_near(product[real], x[real].float() @ weight.float().T, bound=1e-5)


@pytest.mark.parametrize(
    ("tiles", "chunks", "blocks", "most"), [(1, 6, 6, 6), (3, 6, 4, 2), (3, 6, 1, 1), (20, 64, 132, 8)]
)
def test_most_parts(tiles: int, chunks: int, blocks: int, most: int) -> None:
    """Red if a block's share, or the parts of a tile that begins within one, are counted otherwise than dealt."""
    assert most_parts(tiles, chunks, blocks) == most


def test_add_and_norm_of_parts(kernels: EmulatedKernels) -> None:
    """Red if a part is left out, one that wasn't written is added, or the sum isn't the residual."""
    weight, x, by = random(OUTPUTS + 4, COLUMNS, scale=0.1), random(5, COLUMNS), 1 + random(OUTPUTS + 4, scale=0.1)
    residual, y = random(5, OUTPUTS + 4), poisoned(5, OUTPUTS + 4)
    total = (x.float() @ weight.float().T + residual.float()).to(BF16)
    AddRmsNorm(OUTPUTS + 4, 1e-6, kernels)(StreamKLinear(weight, kernels)(x, 5), residual, by, y)
    assert_near(residual, total)
    assert_near(y, reference.rms_norm(total, by, 1e-6))


def test_gate_of_parts(kernels: EmulatedKernels) -> None:
    """Red if gate and up aren't added up from their own tiles' parts."""
    weight, x, y = random(2 * 304, COLUMNS, scale=0.1), random(5, COLUMNS), poisoned(5, 304)
    SiluMul(kernels)(StreamKLinear(weight, kernels)(x, 7), y)
    assert_near(y, reference.silu_mul(x.float() @ weight.float().T))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rope_of_parts_is_rope_of_their_sum(kernels: EmulatedKernels, head_dim: int, biased: bool) -> None:
    """Red if a head's halves come from other parts, the bias is left out, or a row without a slot is written."""
    heads, rows = Heads(4, 2, head_dim), 3
    width = heads.total * head_dim
    weight, x = random(width, COLUMNS, scale=0.1), random(rows, COLUMNS)
    bias = random(width) if biased else None
    norms = 1 + random(head_dim, scale=0.1), 1 + random(head_dim, scale=0.1)
    turns = torch.arange(64)[:, None] * 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    rest = norms, rope_table(turns.cos(), turns.sin()), integers([5, 17, 9]), integers([1, 0, -1])
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    rope = RopeAndStore(heads, 1e-6, kernels, qk_norm=True)
    wanted = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    whole, pages = wanted.to(BF16).view(rows, heads.total, head_dim), torch.zeros(4, 2, 16, 2, head_dim, dtype=BF16)
    rope(whole, *rest, table, pages)
    queries, stored = torch.zeros_like(whole), torch.zeros_like(pages)
    rope(queries, *rest, table, stored, (StreamKLinear(weight, kernels)(x, 5), bias))
    assert_near(queries[:2, : heads.query], whole[:2, : heads.query], bound=1e-2)
    assert_near(stored, pages, bound=1e-2)
    assert not queries[2].any()


@pytest.mark.parametrize("columns", [64, 2560, 9728, 896])
@pytest.mark.parametrize("sms", [8, 48, 96, 132])
def test_every_cut_fits_an_sm(columns: int, sms: int) -> None:
    """Red if a ring is larger than an SM's memory, or too short to have a chunk on its way beside two in use."""
    for token_tiles in TOKEN_TILES:
        cut = choose_cut(columns, token_tiles, sms)
        assert columns % cut.chunk == 0
        assert cut.stages > 2
        assert cut.shared_bytes(token_tiles) <= RING_BYTES


def test_wrong_shapes_are_refused(kernels: EmulatedKernels) -> None:
    """Red if a check before a launch is dropped: what it lets through reads beyond a buffer."""
    linear = StreamKLinear(random(128, 128), kernels)
    for x in (random(65, 128), random(2, 64), random(2, 128).float()):
        with pytest.raises(ValueError, match=r"it must be|takes"):
            linear(x, 4)
    for shape in ((128, 96), (126, 64)):
        with pytest.raises(ValueError, match="multiple of 4 outputs and 64 columns"):
            StreamKLinear(random(*shape), kernels)
    with pytest.raises(ValueError, match="they must be of"):
        SiluMul(kernels)(linear(random(2, 128), 4), poisoned(3, 64))
