"""Large float32 projections in panels are the same linear layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine_core.ops import panels
from engine_core.ops.panels import cpu_projection


@pytest.mark.parametrize("outputs", [64, 256, 704])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 4, 15, 16, 40])
def test_same_as_linear(outputs: int, with_bias: bool, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when panels are put together in a wrong order, or a bias is added to another panel."""
    monkeypatch.setattr(panels, "PANEL_MIN_WEIGHTS", 1)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, 48, generator=generator)
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    x = torch.randn(tokens, 96, generator=generator)[:, :48]
    projection = cpu_projection(weight, bias)
    assert isinstance(projection, panels._Panels)
    torch.testing.assert_close(projection(x), functional.linear(x, weight, bias), atol=1e-4, rtol=1e-5)


def test_panels_are_the_weight_itself() -> None:
    """Red when the weight is held twice."""
    weight = torch.zeros(1024, 512)
    projection = cpu_projection(weight, None)
    assert isinstance(projection, panels._Panels)
    assert projection._panels.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    "weight", [torch.zeros(64, 8), torch.zeros(1030, 512), torch.zeros(1024, 512, dtype=torch.bfloat16)]
)
def test_other_layers_have_no_panels(weight: torch.Tensor) -> None:
    """Red when small layers, bf16 ones or those that 64 doesn't divide are cut."""
    assert not isinstance(cpu_projection(weight, None), panels._Panels)
