"""What a kernel is to the Python around it: a source, its compile-time parameters, and something that launches it.

Owns the types that `nvrtc.CudaKernels` implements on a GPU and tests implement on a CPU. Imports no CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

SOURCES = Path(__file__).parent
Grid = tuple[int, int, int]
Argument = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float | ctypes.Structure


class KernelError(Exception):
    """A kernel doesn't compile, or the driver refused to load or launch it."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled entry point. Equal kernels are compiled once."""

    source: str
    """File name under SOURCES."""
    entry: str
    parameters: tuple[tuple[str, int | str], ...] = ()
    """Compile-time parameters, as the head of the source explains them."""
    most_shared_bytes: int = 0
    """Dynamic shared memory that a launch may ask for."""
    beside_rings: bool = False
    """It runs on SMs whose memory the kernels around it use as shared memory, and mustn't have it divided anew."""


class Launch(Protocol):
    """Enqueues the kernel on torch's current stream; a capture in progress records it."""

    def __call__(self, grid: Grid, threads: int, arguments: Sequence[Argument], shared_bytes: int = 0) -> None: ...


class Kernels(Protocol):
    """Where launches come from. Compiles and loads at once: to be called before any capture."""

    def load(self, kernel: Kernel) -> Launch: ...


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """A pointer argument; None is a null pointer."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def require(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int | None], what: str) -> None:
    """Raise ValueError unless the tensor is contiguous with that dtype and shape (None: any size)."""
    fits = len(tensor.shape) == len(shape) and all(
        size in (None, actual) for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{what} is {describe(tensor)}; it must be contiguous {dtype} {tuple(shape)}")


def describe(tensor: torch.Tensor) -> str:
    return f"{'' if tensor.is_contiguous() else 'strided '}{tensor.dtype} {tuple(tensor.shape)}"
