"""Finds stop strings in a text that arrives in pieces, holding back only what may still become one.

Owns an Aho-Corasick automaton: the work is linear in the text, whatever the stop strings, and what is found doesn't
depend on where pieces break. The match that *ends* first wins; of two that end together, the longer. Knows nothing of
tokens.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


class StopStrings:
    """The automaton of a request's stop strings; immutable, shared by its sequences."""

    __slots__ = ("depths", "edges", "fails", "found", "start")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: non-empty strings."""
        self.edges: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.found: list[str | None] = [None]
        """By state: the longest stop string that ends there."""
        self.fails = [0]
        """By state: the state of its longest proper suffix that is a prefix of a stop string."""
        for stop in stops:
            self._insert(stop)
        self._link()
        first = "".join(re.escape(char) for char in dict.fromkeys(stop[0] for stop in stops))
        self.start = re.compile(f"[{first}]")

    def matcher(self) -> StopMatcher:
        """A matcher for one sequence."""
        return StopMatcher(self)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.edges[state].get(char)
            if following is None:
                following = self.edges[state][char] = len(self.edges)
                self.edges.append({})
                self.depths.append(self.depths[state] + 1)
                self.found.append(None)
                self.fails.append(0)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.edges[state].items():
                fail = self.fails[state]
                while fail and char not in self.edges[fail]:
                    fail = self.fails[fail]
                self.fails[following] = self.edges[fail].get(char, 0)
                if self.found[following] is None:
                    self.found[following] = self.found[self.fails[following]]
                queue.append(following)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found; `text` is what precedes it and wasn't released before."""

    text: str
    stop: str


class StopMatcher:
    """One sequence's text on its way through the automaton."""

    __slots__ = ("_automaton", "_held", "_state")

    def __init__(self, automaton: StopStrings) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""  # the text of the current state: a prefix of some stop string

    def push(self, piece: str) -> str | StopMatch:
        """Text that can't be part of a stop string any more, or the match. Nothing may be pushed after a match."""
        if not self._state and self._automaton.start.search(piece) is None:
            return piece
        edges, fails, found = self._automaton.edges, self._automaton.fails, self._automaton.found
        state = self._state
        for position, char in enumerate(piece, 1):
            while state and char not in edges[state]:
                state = fails[state]
            state = edges[state].get(char, 0)
            stop = found[state]
            if stop is not None:
                text = self._held + piece[:position]
                return StopMatch(text[: len(text) - len(stop)], stop)
        text = self._held + piece
        cut = len(text) - self._automaton.depths[state]
        self._state, self._held = state, text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return held
