"""What the engine sees of its workers: plans go in, results come out, and a loss is an exception.

Owns no transport. The one production implementation is `executor/zmq.py`; tests pass simulated ones.
"""

from __future__ import annotations

from typing import Protocol

from engine_core.request import Grammar
from engine_core.step import GrammarPrepared, StepPlan, StepResult


class Executor(Protocol):
    """Moves plans to every rank and results back, in order. No method blocks."""

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank. Raises EngineDead when a rank is lost or broke the protocol."""

    def collect(self) -> list[StepResult]:
        """Results that have arrived, in step order, possibly none.

        Raises EngineDead, with the whole cause chain in its message, when a rank died, said farewell, broke the
        protocol or let its deadline pass.
        """

    def prepare(self, key: int, grammar: Grammar) -> None:
        """Have every rank compile a grammar, beside its steps; the outcome comes out of `prepared`."""

    def prepared(self) -> list[GrammarPrepared]:
        """Outcomes that came with what `collect` has taken, possibly none."""

    def caught_up(self) -> list[int]:
        """Slots of late rows that may be planned again, which came with what `collect` has taken; possibly none.

        A slot may have got another row meanwhile, which is planned as well then: at worst it is late again.
        """

    def forget(self, key: int) -> None:
        """No row will start with this grammar any more."""

    def quiesce(self) -> None:
        """Ask every rank to synchronize all lanes; `quiesced` turns true with its answer (OWNERSHIP rule O7)."""

    @property
    def quiesced(self) -> bool:
        """Whether the latest `quiesce` was answered by every rank."""
