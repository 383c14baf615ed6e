"""Matrix products of a lane: for each shape the algorithm that was measured fastest on its SMs.

Owns the choices and the file that keeps them between starts. cuBLASLt's own favourite is up to a sixth slower for
shapes that fill the SMs badly, and it can't know how many of them a lane has. What wasn't measured takes the favourite.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Protocol

from torch import Tensor

from engine_core.ops.cuda.cublaslt import CODE_BYTES, Algorithm, CublasLt, Problem, Product


class Multiply(Protocol):
    """y = x W^T (+ bias): x bf16 [rows, inputs], weight bf16 [outputs, inputs], bias bf16 [outputs]; y bf16, or float32
    if `wide`."""

    sms: int
    """Of the lane."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor: ...


class Choices:
    """Algorithms by product, as the library describes them; on disk for one card and library version."""

    def __init__(self, file: Path) -> None:
        """A file that can't be read as such counts as empty: everything is measured anew."""
        self._file = file
        self._codes: dict[str, bytes] = {}
        try:
            codes = {str(key): bytes.fromhex(code) for key, code in json.loads(file.read_bytes()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return
        if all(len(code) == CODE_BYTES for code in codes.values()):
            self._codes = codes

    def find(self, product: Product) -> bytes | None:
        """The algorithm's code; None if it wasn't measured."""
        return self._codes.get(_key(product))

    def choose(self, product: Product, algorithm: Algorithm) -> None:
        self._codes[_key(product)] = algorithm.code

    def save(self) -> None:
        """Replaces the file at once: several processes may do so. Raises OSError."""
        codes = {key: code.hex() for key, code in self._codes.items()}
        with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as file:
            json.dump(codes, file, indent=0, sort_keys=True)
        Path(file.name).rename(self._file)


def choices_file(folder: Path, card: str, version: int) -> Path:
    """In a folder that exists, for this user alone (see nvrtc.CodeCache)."""
    name = "".join(letter if letter.isalnum() else "-" for letter in card)
    return folder / f"matmul-{name}-{version}.json"


def _key(product: Product) -> str:
    kind = ("f32" if product.wide else "bf16") + ("+bias" if product.biased else "")
    return f"{product.rows}x{product.outputs}x{product.inputs}:{kind}:{product.sms}"


class LaneMatmul:
    """The `Multiply` of a lane with so many SMs."""

    def __init__(self, library: CublasLt, choices: Choices, sms: int) -> None:
        self._library = library
        self._choices = choices
        self.sms = sms

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        product = self.product(x.shape[0], weight, wide=wide, biased=bias is not None)
        problem = self._library.problem(product)
        return problem.launch(self._chosen(product, problem) or problem.favourite, x, weight, bias)

    def product(self, rows: int, weight: Tensor, *, wide: bool, biased: bool) -> Product:
        outputs, inputs = weight.shape
        return Product(rows, outputs, inputs, self.sms, wide, biased)

    def unmeasured(self, product: Product) -> Problem | None:
        """What there is to choose from, if nothing was chosen yet."""
        problem = self._library.problem(product)
        return problem if self._chosen(product, problem) is None else None

    def choose(self, product: Product, algorithm: Algorithm) -> None:
        self._choices.choose(product, algorithm)

    def _chosen(self, product: Product, problem: Problem) -> Algorithm | None:
        code = self._choices.find(product)
        return None if code is None else problem.restore(code)
