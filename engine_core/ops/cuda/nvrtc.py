"""Compiles kernels at run time (NVRTC), keeps their machine code on disk, loads and launches them.

Owns everything that speaks to cuda.bindings for kernels. Needs the CUDA context that torch made. Never synchronizes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cuda.bindings import driver, nvrtc

from engine_core.ops.cuda.kernel import SOURCES, Argument, Grid, Kernel, KernelError, Launch

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")


def _nvrtc(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
    return values[0] if values else None


def _driver(call: str, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"{call} returned {status.name} ({int(status)})")
    return values[0] if values else None


def _headers() -> list[Path]:
    return sorted(SOURCES.glob("*.cuh"))


def _options(kernel: Kernel) -> list[str]:
    return [*OPTIONS, *(f"-D{name}={value}" for name, value in kernel.parameters)]


def compile_kernel(kernel: Kernel) -> bytes:
    """Machine code (a cubin). Needs no GPU; takes about a second. Raises KernelError with the compiler's log."""
    source = (SOURCES / kernel.source).read_bytes()
    texts, names = zip(*((path.read_bytes(), path.name.encode()) for path in _headers()), strict=True)
    program = _nvrtc(nvrtc.nvrtcCreateProgram(source, kernel.source.encode(), len(names), texts, names))
    try:
        options = [option.encode() for option in _options(kernel)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_nvrtc(nvrtc.nvrtcGetProgramLogSize(program)))
            _nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
            raise KernelError(f"{kernel} doesn't compile:\n{log.decode().rstrip(chr(0))}")
        code = bytearray(_nvrtc(nvrtc.nvrtcGetCUBINSize(program)))
        _nvrtc(nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code)
    finally:
        _nvrtc(nvrtc.nvrtcDestroyProgram(program))


class CodeCache:
    """Machine code by what it was made from, in a folder that only this user may write."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise KernelError(f"{folder} must belong to this user and be writable by nobody else")
        self._folder = folder
        self._compiler = nvrtc.nvrtcVersion()[1:]

    def get(self, kernel: Kernel) -> bytes:
        """From disk, or compiled and stored. May be called from several threads and processes at once."""
        path = self._folder / f"{Path(kernel.source).stem}-{self._digest(kernel)}.cubin"
        if path.exists():
            return path.read_bytes()
        code = compile_kernel(kernel)
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(code)
        Path(file.name).rename(path)
        return code

    def _digest(self, kernel: Kernel) -> str:
        parts = [SOURCES / kernel.source, *_headers()]
        texts = [hashlib.sha256(part.read_bytes()).hexdigest() for part in parts]
        inputs = [*texts, *_options(kernel), repr(self._compiler)]
        return hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:32]


class CudaKernels:
    """Loaded kernels of this process.

    `current_stream` gives the raw handle of the stream to launch on. With `overlap` a launch may start before its
    predecessor on the stream has ended (programmatic dependent launch, see device.cuh).
    """

    def __init__(self, cache: CodeCache, current_stream: Callable[[], int], *, overlap: bool = True) -> None:
        self._cache = cache
        self._current_stream = current_stream
        self._attributes = [_overlap_attribute()] if overlap else []
        self._launches: dict[Kernel, Launch] = {}
        self._libraries: list[Any] = []

    def prepare(self, kernels: Iterable[Kernel], threads: int) -> None:
        """Compile those that aren't on disk yet, several at a time."""
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._cache.get, kernels))

    def load(self, kernel: Kernel) -> Launch:
        if kernel not in self._launches:
            code = self._cache.get(kernel)
            library = _driver("cuLibraryLoadData", driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
            self._libraries.append(library)
            handle = _driver("cuLibraryGetKernel", driver.cuLibraryGetKernel(library, kernel.entry.encode()))
            _allow_shared_bytes(handle, kernel.most_shared_bytes)
            if kernel.beside_rings:
                _prefer_shared_memory(handle)
            self._launches[kernel] = self._launch(kernel.entry, int(handle))
        return self._launches[kernel]

    def _launch(self, entry: str, handle: int) -> Launch:
        def launch(grid: Grid, threads: int, arguments: Sequence[Argument], shared_bytes: int = 0) -> None:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = shared_bytes
            config.hStream = self._current_stream()
            config.attrs = self._attributes
            config.numAttrs = len(self._attributes)
            values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
            _driver(entry, driver.cuLaunchKernelEx(config, handle, ctypes.addressof(values), 0))

        return launch


def _allow_shared_bytes(kernel: Any, size: int) -> None:
    """Needed beyond 48 KiB. Raises KernelError if the device has less."""
    device = _driver("cuCtxGetDevice", driver.cuCtxGetDevice())
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _driver("cuKernelSetAttribute", driver.cuKernelSetAttribute(attribute, size, kernel, device))


def _prefer_shared_memory(kernel: Any) -> None:
    """An SM can't divide its memory between cache and shared memory anew while blocks run there."""
    device = _driver("cuCtxGetDevice", driver.cuCtxGetDevice())
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    most = int(driver.CUshared_carveout.CU_SHAREDMEM_CARVEOUT_MAX_SHARED)
    _driver("cuKernelSetAttribute", driver.cuKernelSetAttribute(attribute, most, kernel, device))


def _overlap_attribute() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute
