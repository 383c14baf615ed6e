"""What the runner and the worker see of rows that follow grammars, and a worker's rows where none does.

Owns no grammar: `constraints.py` does, for models with a tokenizer.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine_core.device.base import Int32, RowMask
from engine_core.errors import ProtocolViolation
from engine_core.step import GrammarPrepared

Refused = tuple[int, str]
"""(slot, cause) of a row that can't draw anything."""


class Constraints(Protocol):
    """Grammars by key, and the rows that follow them by slot. No method but `late` waits, and that within a bound."""

    def prepare(self, key: int, kind: str, text: str) -> None:
        """Compile a grammar; `outcomes` has the outcome later."""

    def outcomes(self) -> list[GrammarPrepared]:
        """What came of grammars since the last call."""

    def forget(self, key: int) -> None:
        """No row will start with it any more, and nobody wants what its rows draw."""

    def start(self, slot: int, key: int, output: Int32) -> None:
        """A row begins, `output` being what it has drawn before a preemption; key 0: it follows none.

        Raises ProtocolViolation for a grammar that isn't prepared.
        """

    def late(self, slots: Int32) -> list[int]:
        """Those of the rows about to draw that must not yet: what they may draw isn't known."""

    def awaited_until(self, slot: int) -> float | None:
        """Until when a late row is late, should its mask not come before; None: it isn't late any more."""

    def masks(self, slots: Int32) -> tuple[list[RowMask], list[Refused]]:
        """What the rows that are about to draw, none of them late, may draw, and those that can't draw anything."""

    def drawn(self, slots: Int32, tokens: npt.NDArray[np.int32]) -> None:
        """The rows have drawn these tokens: begin their next masks."""


class Unconstrained:
    """The `Constraints` of a worker whose rows follow no grammars."""

    def prepare(self, key: int, kind: str, text: str) -> None:
        raise ProtocolViolation("this worker can't serve grammars, as Ready has said")

    def outcomes(self) -> list[GrammarPrepared]:
        return []

    def forget(self, key: int) -> None:
        raise ProtocolViolation(f"grammar {key} was never prepared")

    def start(self, slot: int, key: int, output: Int32) -> None:
        if key:
            raise ProtocolViolation("a row follows a grammar, which this worker can't serve")

    def late(self, slots: Int32) -> list[int]:
        return []

    def awaited_until(self, slot: int) -> float | None:
        return None

    def masks(self, slots: Int32) -> tuple[list[RowMask], list[Refused]]:
        return [], []

    def drawn(self, slots: Int32, tokens: npt.NDArray[np.int32]) -> None:
        """Nobody asks."""


UNCONSTRAINED = Unconstrained()
