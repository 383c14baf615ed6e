"""Grammars of open requests: which the worker has still to prepare, which it has, and which nobody needs any more.

Owns that a sequence with a grammar starts only once the grammar is prepared. Compiles nothing; the worker does, beside
its steps, so a grammar that takes long or can't be compiled is the affair of its own request.
"""

from __future__ import annotations

from engine_core.errors import RejectReason, StatusCode
from engine_core.request import FinishError, Grammar
from engine_core.scheduling.sequence import Sequence
from engine_core.step import GrammarPrepared


def grammar_error(cause: str) -> FinishError:
    """A grammar that can't be followed is its client's to change."""
    return FinishError(StatusCode.INVALID_ARGUMENT, f"the grammar: {cause}", RejectReason.GRAMMAR, "grammar")


MAX_AHEAD = 32
"""Grammars that the worker compiles ahead of their rows: compiled, each may take 64 MiB."""


class Grammars:
    """By key; a request's sequences share one."""

    def __init__(self) -> None:
        self._users: dict[int, int] = {}
        """Open sequences by key."""
        self._held: dict[int, list[Sequence]] = {}
        """Those that wait for their grammar."""
        self._unsent: dict[int, Grammar] = {}
        self._ahead: set[int] = set()
        """Keys of grammars that the worker was asked for and no row has started with."""
        self._unneeded: list[int] = []

    def hold(self, sequences: list[Sequence], grammar: Grammar) -> None:
        """The sequences of one request wait until their grammar is prepared."""
        key = sequences[0].family.grammar
        self._users[key] = len(sequences)
        self._held[key] = sequences
        self._unsent[key] = grammar

    def closed(self, key: int) -> None:
        """One of the sequences has ended; with the last of them the grammar goes."""
        self._users[key] -= 1
        if self._users[key]:
            return
        del self._users[key]
        self._held.pop(key, None)
        self._ahead.discard(key)
        if self._unsent.pop(key, None) is None:
            self._unneeded.append(key)

    def started(self, key: int) -> None:
        """A row starts with it."""
        self._ahead.discard(key)

    def take_unsent(self) -> list[tuple[int, Grammar]]:
        """Grammars to ask the worker for, in order of arrival, as far as it doesn't hold many that wait for a row."""
        taken: list[tuple[int, Grammar]] = []
        while self._unsent and len(self._ahead) < MAX_AHEAD:
            key = next(iter(self._unsent))
            taken.append((key, self._unsent.pop(key)))
            self._ahead.add(key)
        return taken

    def take_unneeded(self) -> list[int]:
        """Keys that the worker may forget."""
        unneeded, self._unneeded = self._unneeded, []
        return unneeded

    def settle(self, prepared: GrammarPrepared) -> list[Sequence]:
        """The sequences that waited for this grammar and are open."""
        return self._held.pop(prepared.key, [])
