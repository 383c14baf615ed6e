"""The weight-streaming linear kernel on the CPU, against float32."""

from __future__ import annotations

import pytest
import torch

from engine_core.ops.cuda import reference
from engine_core.ops.cuda.linear import Epilogue, LinearWeights, SkinnyLinear, Tile
from tests.emulated import EmulatedKernels
from tests.emulated.comparing import BF16, assert_near, poisoned, random

COLUMNS = 704
"""Eleven pieces: no number of warps divides it."""
OUTPUTS = 44
"""No multiple of a block's rows."""


def make_layer(epilogue: Epilogue, *, normed: bool, wide: bool = False) -> LinearWeights:
    rows = 2 * OUTPUTS if epilogue is Epilogue.GATED else OUTPUTS
    return LinearWeights(
        random(rows, COLUMNS, scale=0.1),
        epilogue,
        1 + random(COLUMNS, scale=0.3) if normed else None,
        1e-6,
        None if epilogue is Epilogue.GATED else random(rows),
        wide,
    )


def run(linear: SkinnyLinear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, reference)."""
    layer = linear.layer
    y = poisoned(x.shape[0], layer.outputs, dtype=torch.float32 if layer.wide else BF16)
    residual = random(*y.shape) if layer.epilogue is Epilogue.ADD else None
    linear(x, y, residual)
    return y, reference.linear(layer, x, residual)


@pytest.mark.parametrize("tokens", [1, 3, 8, 13])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_every_epilogue_with_and_without_norm(
    kernels: EmulatedKernels, epilogue: Epilogue, normed: bool, tokens: int
) -> None:
    """Red if a fragment's columns, a warp's pieces, the last block's rows, the norm's scale or an epilogue is off."""
    linear = SkinnyLinear(make_layer(epilogue, normed=normed), kernels)
    assert_near(*run(linear, random(tokens, COLUMNS)))


@pytest.mark.parametrize("tile", [Tile(4, 2, 2), Tile(16, 1, 1, 1), Tile(2, 4, 3, 4)])
def test_any_tile_computes_the_same(kernels: EmulatedKernels, tile: Tile) -> None:
    """Red if the ring of pieces in flight is read before it is written, or rows of several tiles are mixed up."""
    linear = SkinnyLinear(make_layer(Epilogue.PLAIN, normed=False, wide=True), kernels, tile)
    assert_near(*run(linear, random(11, COLUMNS)), bound=1e-5)


def test_the_output_may_be_the_residual(kernels: EmulatedKernels) -> None:
    """Red if a block reads the residual where another one has written already."""
    linear = SkinnyLinear(make_layer(Epilogue.ADD, normed=False), kernels)
    x, y = random(2, COLUMNS), random(2, OUTPUTS)
    wanted = reference.linear(linear.layer, x, y)
    linear(x, y, y)
    assert_near(y, wanted)


@pytest.mark.parametrize(("normed", "tokens"), [(False, 3), (True, 3), (True, 5)])
def test_a_row_of_nan_stays_in_its_row(kernels: EmulatedKernels, normed: bool, tokens: int) -> None:
    """Red if a padding row's content reaches a real row (through the product or the norm)."""
    linear = SkinnyLinear(make_layer(Epilogue.GATED, normed=normed), kernels)
    x = random(tokens, COLUMNS)
    x[1] = torch.nan
    y = poisoned(tokens, OUTPUTS)
    linear(x, y)
    real = [row for row in range(tokens) if row != 1]
    assert_near(y[real], reference.linear(linear.layer, x[real]))


def test_wrong_shapes_are_refused(kernels: EmulatedKernels) -> None:
    """Red if a check before a launch is dropped: what it lets through reads beyond a buffer."""
    linear = SkinnyLinear(make_layer(Epilogue.ADD, normed=False), kernels)
    x, y = random(2, COLUMNS), random(2, OUTPUTS)
    for arguments in (
        (random(17, COLUMNS), random(17, OUTPUTS), random(17, OUTPUTS)),
        (random(2, COLUMNS + 64), y, y),
        (x, y.float(), y),
        (x, y, None),
        (x, y, random(3, OUTPUTS)),
        (random(COLUMNS, 2).T, y, y),
    ):
        with pytest.raises(ValueError, match=r"it must be|takes|goes with"):
            linear(*arguments)
    with pytest.raises(ValueError, match="multiple of 64"):
        SkinnyLinear(LinearWeights(random(16, 100)), kernels)
