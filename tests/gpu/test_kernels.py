"""Every CUDA kernel against float32 on the GPU it will run on: the checks of scripts/gpu_kernels.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["linear", "matmul", "layer", "attention", "prefill", "sampling", "step"])
def test_kernels(cuda: Any, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """Red if a kernel's result leaves float32 by more than bf16 rounding, or launches that overlap change a result."""
    from scripts.gpu_kernel_checks import CHECKS

    cache: Path = tmp_path_factory.getbasetemp() / "kernels"
    assert CHECKS[name](cache)
    assert cuda.is_available()
