"""Which algorithm a matrix product takes, and what of it outlives the process; sizes of forwards with chunks."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from engine_core.device.cuda.graphs import CHUNK_SIZES, LEAST_CHUNK, MIXED_ROWS, TILE_CHUNK, mixed_chunk_sizes
from engine_core.device.cuda.tuning import Neighbour, Wanted, keep, tune
from engine_core.ops.cuda.cublaslt import CODE_BYTES, Algorithm, CublasLt, Problem, Product
from engine_core.ops.cuda.decoder import Weights
from engine_core.ops.cuda.matmul import Choices, LaneMatmul, choices_file

PRODUCT = Product(rows=256, outputs=19456, inputs=2560, sms=132)
FAST, OTHER, SLOW = (Algorithm(bytes([number]) * CODE_BYTES, 0) for number in range(3))


def test_a_choice_is_found_again_by_another_process(tmp_path: Path) -> None:
    """Red when `save` writes nothing or keys leave a field out."""
    choices = Choices(tmp_path / "choices.json")
    choices.choose(PRODUCT, OTHER)
    choices.save()
    assert Choices(tmp_path / "choices.json").find(PRODUCT) == OTHER.code


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
    choices.choose(PRODUCT, OTHER)
    assert choices.find(other) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[1, 2]", '{"a": "b"}', '{"a": null}', "\x00", '{"a": 3}', '{"a": "0011"}']
)
def test_a_broken_file_counts_as_empty(tmp_path: Path, content: str) -> None:
    """Red when any of these raises: a torn file, or one of an older version, must not keep a server from starting; and
    red when a code of the wrong length is handed to the library."""
    file = tmp_path / "choices.json"
    file.write_text(content)
    choices = Choices(file)
    assert choices.find(PRODUCT) is None
    choices.choose(PRODUCT, OTHER)
    choices.save()
    assert Choices(file).find(PRODUCT) == OTHER.code


def test_choices_that_cannot_be_kept_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red when a full disk or a folder that is gone keeps a server from starting, or nobody hears of it."""
    choices = Choices(tmp_path / "gone" / "choices.json")
    choices.choose(PRODUCT, OTHER)
    with caplog.at_level("WARNING"):
        keep(choices)
    assert "choices_not_kept" in caplog.text
    assert choices.find(PRODUCT) == OTHER.code


class _Problem:
    """A product that a library without a card knows: whatever it proposes it can also restore."""

    def __init__(self, refused: tuple[Algorithm, ...] = ()) -> None:
        self.known = {way.code: way for way in (FAST, OTHER, SLOW) if way not in refused}

    def proposals(self) -> list[Algorithm]:
        return list(self.known.values())

    def restore(self, code: bytes) -> Algorithm | None:
        return self.known.get(code)


class _Library:
    def __init__(self, problem: _Problem) -> None:
        self._problem = problem

    def problem(self, _: Product) -> _Problem:
        return self._problem


class _Times:
    """Seconds alone, and what both lanes take."""

    def __init__(self, alone: dict[Algorithm, float], beside: dict[Algorithm, float]) -> None:
        self._alone = alone
        self._beside = beside

    def alone(self, _: Wanted, rows: int, problem: Problem, algorithm: Algorithm) -> float:
        return self._alone[algorithm]

    def beside(self, _: Wanted, rows: int, problem: Problem, algorithm: Algorithm) -> float:
        return self._beside[algorithm]


ALONE = {FAST: 1.0, OTHER: 1.1, SLOW: 1.5}
BESIDE = {FAST: 3.0, OTHER: 2.0, SLOW: 1.0}


def _tuned(tmp_path: Path, times: _Times, *, shared: bool) -> bytes | None:
    choices = Choices(tmp_path / "choices.json")
    multiply = LaneMatmul(cast(CublasLt, _Library(_Problem())), choices, 60)
    weights = Weights([torch.zeros(8, 4)])
    neighbour = Neighbour(multiply, None, [weights], 64, decodes=True) if shared else None
    wanted = [Wanted(multiply, None, weights, (256,), neighbour)]
    assert tune(wanted, times, lambda done, total: None) == 1
    assert tune(wanted, times, lambda done, total: None) == 0
    return choices.find(Product(256, 8, 4, 60))


def test_a_lane_of_its_own_takes_the_fastest(tmp_path: Path) -> None:
    """Red when what was measured beside another lane counts where there is none."""
    assert _tuned(tmp_path, _Times(ALONE, {}), shared=False) == FAST.code


def test_a_lane_that_shares_the_card_takes_what_both_lanes_get_on_with_best(tmp_path: Path) -> None:
    """Red when the fastest alone is taken all the same, or one that is much slower alone (SLOW) is looked at at all."""
    assert _tuned(tmp_path, _Times(ALONE, BESIDE), shared=True) == OTHER.code


def test_where_nothing_is_nearly_as_fast_nothing_more_is_measured(tmp_path: Path) -> None:
    """Red when a lone algorithm is measured beside the other lane, too: a start would take longer for nothing."""
    assert _tuned(tmp_path, _Times({FAST: 1.0, OTHER: 1.2, SLOW: 1.5}, {}), shared=True) == FAST.code


def test_a_choice_that_the_library_refuses_is_measured_anew(tmp_path: Path) -> None:
    """Red when a code from the file is launched unchecked: another card's, or a damaged one."""
    choices = Choices(tmp_path / "choices.json")
    choices.choose(PRODUCT, SLOW)
    multiply = LaneMatmul(cast(CublasLt, _Library(_Problem(refused=(SLOW,)))), choices, 132)
    assert multiply.unmeasured(PRODUCT) is not None


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
