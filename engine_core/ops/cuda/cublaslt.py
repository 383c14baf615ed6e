"""y = x W^T (+ bias) through cuBLASLt, with the algorithm named by the caller.

Owns everything that speaks to the library, which torch has loaded already. `matmul.py` owns which algorithm is taken.
Launches go to torch's current stream and may be captured. Never synchronizes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from engine_core.ops.cuda.kernel import KernelError, require

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete
MOST_CANDIDATES = 32
WORKSPACE_BYTES = 32 << 20
"""What the library asks for on this generation of cards."""
ALIGNMENT = 256
"""Bytes; what the library assumes of every pointer unless it is told otherwise."""
_COMPUTE_F32, _BF16, _F32, _TRANSPOSED = 68, 14, 0, 1
_TRANSA, _EPILOGUE, _BIAS_POINTER, _SM_COUNT_TARGET = 3, 7, 8, 15  # attributes of an operation
_EPILOGUE_BIAS = 4
_MOST_WORKSPACE, _REDUCTIONS = 1, 3  # attributes of a preference
_REDUCE_IN_F32 = 2
"""Split sums are added up in float32, not in the output's bf16."""


class _Candidate(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Product:
    """One shape: x bf16 [rows, inputs], W bf16 [outputs, inputs], y bf16 or, if `wide`, float32 [rows, outputs]."""

    rows: int
    outputs: int
    inputs: int
    sms: int
    """That the stream has to itself."""
    wide: bool = False
    biased: bool = False


class CublasLt:
    """The library on the current device, of `sms` SMs. Raises KernelError for whatever it refuses."""

    def __init__(self, sms: int) -> None:
        cuda = torch.version.cuda
        if cuda is None:
            raise KernelError("this torch was built without CUDA")
        self._library = ctypes.CDLL(f"libcublasLt.so.{cuda.partition('.')[0]}")
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = int(self._library.cublasLtGetVersion())
        self.sms = sms
        self.handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self._problems: dict[Product, Problem] = {}

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise KernelError(f"{name} returned {status}")

    def problem(self, product: Product) -> Problem:
        if product not in self._problems:
            self._problems[product] = Problem(self, product)
        return self._problems[product]


class Problem:
    """A product's descriptors and the algorithms that the library proposes for it, its own favourite first.

    Kept until the process ends. The library counts in columns: W is its first matrix, transposed, x its second.
    """

    def __init__(self, library: CublasLt, product: Product) -> None:
        self._library = library
        self._product = product
        self._operation = ctypes.c_void_p()
        library.call("cublasLtMatmulDescCreate", ctypes.byref(self._operation), _COMPUTE_F32, _F32)
        self._set(_TRANSA, ctypes.c_int32(_TRANSPOSED))
        if product.sms < library.sms:
            self._set(_SM_COUNT_TARGET, ctypes.c_int32(product.sms))
        if product.biased:
            self._set(_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
        rows, outputs, inputs = product.rows, product.outputs, product.inputs
        self._weight = self._layout(_BF16, inputs, outputs)
        self._x = self._layout(_BF16, inputs, rows)
        self._y = self._layout(_F32 if product.wide else _BF16, outputs, rows)
        self._candidates = self._ask()
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def __len__(self) -> int:
        return len(self._candidates)

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._library.call("cublasLtMatmulDescSetAttribute", self._operation, attribute, ctypes.byref(value), size)

    def _layout(self, dtype: int, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        self._library.call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), dtype, *sizes)
        return layout

    def _ask(self) -> list[_Candidate]:
        call, preference = self._library.call, ctypes.c_void_p()
        call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        for attribute, value in (
            (_MOST_WORKSPACE, ctypes.c_size_t(WORKSPACE_BYTES)),
            (_REDUCTIONS, ctypes.c_uint32(_REDUCE_IN_F32)),
        ):
            size = ctypes.c_size_t(ctypes.sizeof(value))
            call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), size)
        results, count = (_Candidate * MOST_CANDIDATES)(), ctypes.c_int()
        matrices = (self._weight, self._x, self._y, self._y)
        asked = (preference, MOST_CANDIDATES, results, ctypes.byref(count))
        call("cublasLtMatmulAlgoGetHeuristic", self._library.handle, self._operation, *matrices, *asked)
        call("cublasLtMatmulPreferenceDestroy", preference)
        candidates = [result for result in results[: count.value] if result.status == 0]
        if not candidates:
            raise KernelError(f"cuBLASLt has no algorithm for {self._product}")
        return candidates

    def launch(self, algorithm: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """y by that candidate. Raises ValueError for tensors of another shape or alignment than the product's."""
        product = self._product
        require(x, torch.bfloat16, (product.rows, product.inputs), "x")
        require(weight, torch.bfloat16, (product.outputs, product.inputs), "weight")
        candidate = self._candidates[algorithm]
        y = x.new_empty(product.rows, product.outputs, dtype=torch.float32 if product.wide else torch.bfloat16)
        workspace = x.new_empty(max(ALIGNMENT, candidate.workspace), dtype=torch.uint8)
        if (x.data_ptr() | weight.data_ptr() | y.data_ptr() | workspace.data_ptr()) % ALIGNMENT:
            raise ValueError(f"{product} needs tensors aligned to {ALIGNMENT} bytes")
        if bias is not None:
            require(bias, torch.bfloat16, (product.outputs,), "bias")
            self._set(_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        self._library.call(
            "cublasLtMatmul",
            *(self._library.handle, self._operation),
            *(ctypes.byref(self._one), ctypes.c_void_p(weight.data_ptr()), self._weight),
            *(ctypes.c_void_p(x.data_ptr()), self._x),
            *(ctypes.byref(self._zero), ctypes.c_void_p(y.data_ptr()), self._y),
            *(ctypes.c_void_p(y.data_ptr()), self._y),
            *(ctypes.byref(candidate.algorithm), ctypes.c_void_p(workspace.data_ptr())),
            *(ctypes.c_size_t(candidate.workspace), ctypes.c_void_p(int(_cuda.current_stream().cuda_stream))),
        )
        return y
