"""How emulated results are compared: by the norm of the difference, which a NaN never passes."""

from __future__ import annotations

import torch

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(BF16)


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def integers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, bound: float = 5e-3) -> None:
    """Within `bound` of the expected norm: bf16 rounding alone stays under 4e-3."""
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    assert error < bound, f"relative error {error:.2e}"
