"""What a step can't do without: bytes and operations of the floor table."""

from __future__ import annotations

import pytest

from scripts.bench.floor import floor_of, layer_weights
from scripts.bench.make_shape import SHAPES


def test_weights_of_a_known_shape() -> None:
    """Red when a product is left out or counted twice: Qwen3-4B has 8.04 GB with its head."""
    assert layer_weights(SHAPES["4b"]) == 36 * (12288 * 2560 - 2048 * 2560 + 3 * 2560 * 9728)
    assert floor_of("decode:1", 1.0, SHAPES["4b"]).gbytes == pytest.approx(8.04 + 0.151, abs=0.01)


def test_what_bounds_a_step() -> None:
    """Red when the shorter of the two times is taken: decode is bound by bytes, a long prompt by operations."""
    decode, prefill = (floor_of(case, 3000.0, SHAPES["4b"]) for case in ("decode:16", "prefill:2048"))
    assert decode.floor_us == pytest.approx(1e3 * decode.gbytes / 4.2, rel=1e-6)
    assert prefill.floor_us == pytest.approx(1e3 * prefill.gflop / 790, rel=1e-6)
    assert decode.ratio == pytest.approx(3000.0 / decode.floor_us)


def test_mixed_steps_count_both() -> None:
    """Red when a mixed step's rows or its chunk are left out."""
    shape = SHAPES["0.6b"]
    mixed = floor_of("mixed:16+256", 1.0, shape)
    assert mixed.gflop > floor_of("prefill:256", 1.0, shape).gflop
    assert mixed.gbytes > floor_of("decode:16", 1.0, shape).gbytes


def test_a_lane_has_none() -> None:
    """Red when a case that two lanes share gets a floor."""
    with pytest.raises(ValueError, match="no floor"):
        floor_of("lane:16+4096", 1.0, SHAPES["4b"])
