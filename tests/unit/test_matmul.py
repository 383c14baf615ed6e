"""Which algorithm a matrix product takes, and what of it outlives the process; sizes of forwards with chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_core.device.cuda.graphs import CHUNK_SIZES, LEAST_CHUNK, MIXED_ROWS, TILE_CHUNK, mixed_chunk_sizes
from engine_core.device.cuda.tuning import keep
from engine_core.ops.cuda.cublaslt import Product
from engine_core.ops.cuda.matmul import Choices, choices_file

PRODUCT = Product(rows=256, outputs=19456, inputs=2560, sms=132)


def test_a_choice_is_found_again_by_another_process(tmp_path: Path) -> None:
    """Red when `save` writes nothing or keys leave a field out."""
    choices = Choices(tmp_path / "choices.json")
    choices.choose(PRODUCT, 3)
    choices.save()
    assert Choices(tmp_path / "choices.json").find(PRODUCT, 8) == 3


@pytest.mark.parametrize(
    "other",
    [
        Product(255, 19456, 2560, 132),
        Product(256, 19455, 2560, 132),
        Product(256, 19456, 2561, 132),
        Product(256, 19456, 2560, 68),
        Product(256, 19456, 2560, 132, wide=True),
        Product(256, 19456, 2560, 132, biased=True),
    ],
)
def test_a_choice_holds_for_its_own_shape_and_lane_alone(tmp_path: Path, other: Product) -> None:
    """Red when the key forgets what `other` changes."""
    choices = Choices(tmp_path / "choices.json")
    choices.choose(PRODUCT, 3)
    assert choices.find(other, 8) is None


@pytest.mark.parametrize("place", [-1, 8, 1000])
def test_a_place_that_the_library_did_not_propose_is_no_choice(tmp_path: Path, place: int) -> None:
    """Red without the bound: another library version's file would index beyond the list."""
    choices = Choices(tmp_path / "choices.json")
    choices.choose(PRODUCT, place)
    assert choices.find(PRODUCT, 8) is None


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"a": "b"}', '{"a": null}', "\x00"])
def test_a_broken_file_counts_as_empty(tmp_path: Path, content: str) -> None:
    """Red when any of these raises: a torn file must not keep a server from starting."""
    file = tmp_path / "choices.json"
    file.write_text(content)
    choices = Choices(file)
    assert choices.find(PRODUCT, 8) is None
    choices.choose(PRODUCT, 1)
    choices.save()
    assert Choices(file).find(PRODUCT, 8) == 1


def test_choices_that_cannot_be_kept_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red when a full disk or a folder that is gone keeps a server from starting, or nobody hears of it."""
    choices = Choices(tmp_path / "gone" / "choices.json")
    choices.choose(PRODUCT, 1)
    with caplog.at_level("WARNING"):
        keep(choices)
    assert "choices_not_kept" in caplog.text
    assert choices.find(PRODUCT, 8) == 1


def test_the_file_names_card_and_version(tmp_path: Path) -> None:
    """Red when two cards or two library versions share choices."""
    files = {choices_file(tmp_path, card, version) for card in ("NVIDIA H200", "NVIDIA H100") for version in (1, 2)}
    assert len(files) == 4
    assert all(file.parent == tmp_path and "/" not in file.name for file in files)


@pytest.mark.parametrize("rows", MIXED_ROWS)
@pytest.mark.parametrize("most", [32, 256, 512, 2000, 2048, 8192])
def test_rows_and_chunk_fill_whole_tiles(rows: int, most: int) -> None:
    """Red when chunks beside decode rows are rounded without them: 16 + 240 tokens fill tiles of 64. 16 + 256 don't,
    and are there for attention's sake alone."""
    sizes = mixed_chunk_sizes(rows, most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert all((rows + size) % 64 == 0 or size == TILE_CHUNK for size in sizes[:-1])
    assert all(size >= LEAST_CHUNK for size in sizes[:-1])


def test_chunks_alone_fill_whole_tiles_too() -> None:
    """Red when a size is added that leaves most of a tile empty."""
    assert all(size % 64 == 0 for size in CHUNK_SIZES if size > LEAST_CHUNK)
