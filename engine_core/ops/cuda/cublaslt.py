"""y = x W^T (+ bias) through cuBLASLt, with the algorithm named by the caller.

Owns everything that speaks to the library, which torch has loaded already. `matmul.py` owns which algorithm is taken.
Launches go to torch's current stream and may be captured. Never synchronizes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from engine_core.ops.cuda.kernel import KernelError, require

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete
MOST_PROPOSALS = 32
WIDE_OUTPUTS = 65536
"""Of a product that fills any card: what the library proposes for it suits narrower ones, too, and isn't always among
its proposals for those."""
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


_Code = ctypes.c_uint64 * 8
CODE_BYTES = ctypes.sizeof(_Code)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("code", _Code),
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


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to compute one product."""

    code: bytes
    """The library's own description, the same in every process with the same version of it."""
    workspace: int
    """Bytes."""


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
        self.current_stream = partial(torch._C._cuda_getCurrentRawStream, _cuda.current_device())
        self.handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self._problems: dict[Product, Problem] = {}

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise KernelError(f"{name} returned {status}")

    def succeeds(self, name: str, *arguments: Any) -> bool:
        """Of a question whose answer is the status."""
        return int(getattr(self._library, name)(*arguments)) == 0

    def problem(self, product: Product) -> Problem:
        if product not in self._problems:
            self._problems[product] = Problem(self, product)
        return self._problems[product]


class _Description:
    """A product in the library's terms. It counts in columns: W is its first matrix, transposed, x its second."""

    def __init__(self, library: CublasLt, product: Product) -> None:
        self._library = library
        self.operation = ctypes.c_void_p()
        library.call("cublasLtMatmulDescCreate", ctypes.byref(self.operation), _COMPUTE_F32, _F32)
        self.set(_TRANSA, ctypes.c_int32(_TRANSPOSED))
        if product.sms < library.sms:
            self.set(_SM_COUNT_TARGET, ctypes.c_int32(product.sms))
        if product.biased:
            self.set(_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
        rows, outputs, inputs = product.rows, product.outputs, product.inputs
        self.weight = self._layout(_BF16, inputs, outputs)
        self.x = self._layout(_BF16, inputs, rows)
        self.y = self._layout(_F32 if product.wide else _BF16, outputs, rows)

    def set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._library.call("cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.byref(value), size)

    def _layout(self, dtype: int, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        self._library.call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), dtype, *sizes)
        return layout

    def destroy(self) -> None:
        self._library.call("cublasLtMatmulDescDestroy", self.operation)
        for layout in (self.weight, self.x, self.y):
            self._library.call("cublasLtMatrixLayoutDestroy", layout)

    def ask(self) -> list[_Proposal]:
        """The library's proposals, its favourite first."""
        call, preference = self._library.call, ctypes.c_void_p()
        call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        for attribute, value in (
            (_MOST_WORKSPACE, ctypes.c_size_t(WORKSPACE_BYTES)),
            (_REDUCTIONS, ctypes.c_uint32(_REDUCE_IN_F32)),
        ):
            size = ctypes.c_size_t(ctypes.sizeof(value))
            call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), size)
        results, count = (_Proposal * MOST_PROPOSALS)(), ctypes.c_int()
        matrices = (self.weight, self.x, self.y, self.y)
        asked = (preference, MOST_PROPOSALS, results, ctypes.byref(count))
        call("cublasLtMatmulAlgoGetHeuristic", self._library.handle, self.operation, *matrices, *asked)
        call("cublasLtMatmulPreferenceDestroy", preference)
        return [result for result in results[: count.value] if result.status == 0]

    def check(self, code: bytes) -> Algorithm | None:
        """The algorithm, if it can compute this product here within the workspace that there is."""
        result, copy = _Proposal(), _Code.from_buffer_copy(code)
        matrices = (self.weight, self.x, self.y, self.y)
        asked = (self._library.handle, self.operation, *matrices, ctypes.byref(copy), ctypes.byref(result))
        if not self._library.succeeds("cublasLtMatmulAlgoCheck", *asked) or result.workspace > WORKSPACE_BYTES:
            return None
        return Algorithm(code, result.workspace)


class Problem:
    """A product as the library sees it. Kept until the process ends."""

    def __init__(self, library: CublasLt, product: Product) -> None:
        self._library = library
        self._product = product
        self._description = _Description(library, product)
        self._checked: dict[bytes, Algorithm | None] = {}
        self._favourite: Algorithm | None = None
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    @property
    def favourite(self) -> Algorithm:
        """The library's own. Raises KernelError if it has none."""
        if self._favourite is None:
            own = self._description.ask()
            if not own:
                raise KernelError(f"cuBLASLt has no algorithm for {self._product}")
            self._favourite = Algorithm(bytes(own[0].code), own[0].workspace)
            self._checked[self._favourite.code] = self._favourite
        return self._favourite

    def restore(self, code: bytes) -> Algorithm | None:
        """The algorithm of that description; None if it can't compute this product."""
        if code not in self._checked:
            self._checked[code] = self._description.check(code)
        return self._checked[code]

    def proposals(self) -> list[Algorithm]:
        """Those for this product on its SMs, the favourite first; then those for the product on the whole card, and for
        a wide one, as far as they can compute this one.

        The library knows little of shares of a card: its proposals for 60 SMs come in clusters of four thread blocks,
        which fill them badly.
        """
        card = replace(self._product, sms=self._library.sms)
        codes = [self.favourite.code]
        for product in dict.fromkeys((self._product, card, replace(card, outputs=WIDE_OUTPUTS))):
            description = _Description(self._library, product)
            codes += [bytes(proposal.code) for proposal in description.ask()]
            description.destroy()
        found = (self.restore(code) for code in dict.fromkeys(codes))
        return [algorithm for algorithm in found if algorithm is not None]

    def launch(
        self, algorithm: Algorithm, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """y by that algorithm. Raises ValueError for tensors of another shape or alignment than the product's."""
        product, description = self._product, self._description
        require(x, torch.bfloat16, (product.rows, product.inputs), "x")
        require(weight, torch.bfloat16, (product.outputs, product.inputs), "weight")
        y = x.new_empty(product.rows, product.outputs, dtype=torch.float32 if product.wide else torch.bfloat16)
        workspace = x.new_empty(max(ALIGNMENT, algorithm.workspace), dtype=torch.uint8)
        if (x.data_ptr() | weight.data_ptr() | y.data_ptr() | workspace.data_ptr()) % ALIGNMENT:
            raise ValueError(f"{product} needs tensors aligned to {ALIGNMENT} bytes")
        if bias is not None:
            require(bias, torch.bfloat16, (product.outputs,), "bias")
            description.set(_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        code = _Code.from_buffer_copy(algorithm.code)
        self._library.call(
            "cublasLtMatmul",
            *(self._library.handle, description.operation),
            *(ctypes.byref(self._one), ctypes.c_void_p(weight.data_ptr()), description.weight),
            *(ctypes.c_void_p(x.data_ptr()), description.x),
            *(ctypes.byref(self._zero), ctypes.c_void_p(y.data_ptr()), description.y),
            *(ctypes.c_void_p(y.data_ptr()), description.y),
            *(ctypes.byref(code), ctypes.c_void_p(workspace.data_ptr())),
            *(ctypes.c_size_t(algorithm.workspace), ctypes.c_void_p(self._library.current_stream())),
        )
        return y
