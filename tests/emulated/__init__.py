"""Runs the CUDA kernels on the CPU: the same sources, compiled by g++ against this folder's device.cuh.

Owns the test double of `engine_core.ops.cuda.nvrtc.CudaKernels`. Slow, meant for small shapes, exact in what it checks:
index arithmetic, fragment layouts, barriers and reductions are the product's own.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from engine_core.ops.cuda.kernel import SOURCES, Argument, Grid, Kernel, Launch

HERE = Path(__file__).parent


class EmulatedKernels:
    """Compiles into `folder` and launches on CPU tensors."""

    def __init__(self, folder: Path, *, late_products: bool = False) -> None:
        """`late_products`: when asynchronous copies and products happen, see device.cuh."""
        self._folder = folder
        self._late = ["-DLATE_PRODUCTS"] if late_products else []

    def load(self, kernel: Kernel) -> Launch:
        """Compiles at the first launch: many kernels are loaded that a test never runs."""

        def launch(grid: Grid, threads: int, arguments: Sequence[Argument], shared_bytes: int = 0) -> None:
            assert shared_bytes <= kernel.most_shared_bytes
            values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
            library = ctypes.CDLL(str(self._compile(kernel)))
            library.emulate((ctypes.c_uint32 * 3)(*grid), ctypes.c_uint32(threads), values)

        return launch

    def _compile(self, kernel: Kernel) -> Path:
        program = (
            f"{(SOURCES / kernel.source).read_text()}\n"
            'extern "C" void emulate(const u32* grid, u32 threads, void** arguments) {\n'
            f"  emulation::launch({kernel.entry}, grid, threads, arguments);\n}}\n"
        )
        defines = [*self._late, *(f"-D{name}={value}" for name, value in kernel.parameters)]
        headers = [HERE / "device.cuh", *sorted(SOURCES.glob("*.cuh"))]
        inputs = program, *(header.read_text() for header in headers), *defines
        digest = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:16]
        library = self._folder / f"{kernel.entry}-{digest}.so"
        if not library.exists():
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-ffp-contract=off", f"-I{HERE}", f"-I{SOURCES}"]
            # From standard input and an empty place, so that this folder's device.cuh is found first.
            command = ["g++", *flags, *defines, "-x", "c++", "-", "-o", str(library)]
            subprocess.run(command, input=program, text=True, check=True, cwd=self._folder)
        return library
