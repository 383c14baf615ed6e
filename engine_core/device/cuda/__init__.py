"""The CUDA device: real weights, real streams, graphs. Its modules are imported only where there is a GPU."""

from __future__ import annotations

import torch

from engine_core.errors import ConfigError


def require_gpu(device: str) -> None:
    """Raise ConfigError unless torch can use a GPU; before anything is imported that needs one."""
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: torch finds no NVIDIA GPU here; use --device cpu")
