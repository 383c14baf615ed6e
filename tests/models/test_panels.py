"""Large float32 projections in panels are the same linear layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine_core.ops import panels
from engine_core.ops.panels import cpu_projection


@pytest.mark.parametrize("outputs", [255, 256, 700])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_same_as_linear(outputs: int, with_bias: bool, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when panels are put together in a wrong order, or the last one's padding shows."""
    monkeypatch.setattr(panels, "PANEL_MIN_ROWS", 1)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, 48, generator=generator)
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    x = torch.randn(tokens, 96, generator=generator)[:, :48]
    projection = cpu_projection(weight, bias)
    assert isinstance(projection, panels._Panels)
    torch.testing.assert_close(projection(x), functional.linear(x, weight, bias), atol=1e-4, rtol=1e-5)


def test_small_and_bf16_layers_stay_as_they_are() -> None:
    """Red when layers that gain nothing are copied."""
    for weight in (torch.zeros(64, 8), torch.zeros(4096, 8, dtype=torch.bfloat16)):
        assert not isinstance(cpu_projection(weight, None), panels._Panels)
