"""Who waits for whom while grammars are compiled: nobody for a slow one, and none of them for clients that left."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest

from engine_core.step import GrammarPrepared
from engine_core.worker.constraints import Grammars
from engine_core.worker.grammar import Vocabulary
from engine_core.worker.grammar_check import GrammarCheck, GrammarLate

FILE = str(Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen" / "tokenizer.json")
VOCAB, EOS = 4096, 2
GUARD_S = 60.0


class Checks(GrammarCheck):
    """Tries nothing: grammars that begin with "slow" are late, and wait at the gate where they may."""

    def __init__(self, waits: bool) -> None:
        super().__init__(FILE, VOCAB, [EOS])
        self._waits = waits
        self.gate = threading.Event()
        self.began: queue.SimpleQueue[str] = queue.SimpleQueue()

    def check(self, kind: str, text: str, within: float = 0.0) -> None:
        self.began.put(text)
        if text.startswith("slow") and not self._waits:
            raise GrammarLate("late")
        if text.startswith("slow"):
            assert self.gate.wait(GUARD_S)


class Rig:
    def __init__(self) -> None:
        self.quick, self.thorough = Checks(waits=False), Checks(waits=True)
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        vocabulary = Vocabulary(FILE, VOCAB, [EOS])
        self.grammars = Grammars(vocabulary, self.quick, self.thorough, lambda: self._woken.put(None))

    def prepare(self, key: int, text: str) -> None:
        self.grammars.prepare(key, "regex", text)

    def outcomes(self, count: int) -> list[GrammarPrepared]:
        """The next ones, in their order."""
        for _ in range(count):
            self._woken.get(timeout=GUARD_S)
        return self.grammars.outcomes()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_nobody_waits_for_a_slow_grammar(rig: Rig) -> None:
    """Red when a grammar that can be tried at once is compiled behind one that can't, or the slow one is lost."""
    rig.prepare(1, "slow")
    assert rig.thorough.began.get(timeout=GUARD_S) == "slow"
    rig.prepare(2, "a")
    rig.prepare(3, "b")
    assert rig.outcomes(2) == [GrammarPrepared(2), GrammarPrepared(3)]
    rig.thorough.gate.set()
    assert rig.outcomes(1) == [GrammarPrepared(1)]


def test_what_nobody_waits_for_is_not_compiled(rig: Rig) -> None:
    """Red when clients that left keep others waiting: each of their grammars would take its seconds all the same."""
    rig.prepare(1, "slow one")
    assert rig.thorough.began.get(timeout=GUARD_S) == "slow one"
    for key in range(2, 50):
        rig.prepare(key, f"slow {key}")
    rig.prepare(50, "slow, but waited for")
    rig.prepare(51, "a")
    assert rig.outcomes(1) == [GrammarPrepared(51)]
    for key in range(2, 50):
        rig.grammars.forget(key)
    rig.thorough.gate.set()
    assert rig.outcomes(2) == [GrammarPrepared(1), GrammarPrepared(50)]
    assert rig.thorough.began.get(timeout=GUARD_S) == "slow, but waited for"
    assert rig.thorough.began.empty()
