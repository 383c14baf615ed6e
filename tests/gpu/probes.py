"""The kernels of probe.cu, compiled and launched as the product's own are. Needs a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from engine_core.ops.cuda.kernel import Kernel, address

SOURCE = str(Path(__file__).with_name("probe.cu"))
MAX_SMS = 256
BLOCKS, THREADS = 4096, 256


class Probes:
    """Launches on torch's current stream. `folder` keeps the machine code."""

    def __init__(self, folder: Path) -> None:
        import torch

        from engine_core.ops.cuda.nvrtc import CodeCache, CudaKernels

        cuda: Any = torch.cuda
        kernels = CudaKernels(CodeCache(folder), lambda: int(cuda.current_stream().cuda_stream), overlap=False)
        self._torch = torch
        self._hold = kernels.load(Kernel(SOURCE, "hold"))
        self._record_sm = kernels.load(Kernel(SOURCE, "record_sm"))

    def hold(self, milliseconds: int) -> None:
        """Work that ends by itself after that time."""
        self._hold((1, 1, 1), 1, [ctypes.c_int32(milliseconds)])

    def seen_sms(self) -> Any:
        """A buffer for `record_sms`."""
        return self._torch.zeros(MAX_SMS, dtype=self._torch.int32, device="cuda")

    def record_sms(self, seen: Any) -> None:
        """Enough blocks to be on every SM that the stream may use."""
        self._record_sm((BLOCKS, 1, 1), THREADS, [address(seen)])
