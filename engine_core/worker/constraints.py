"""What rows may draw next, where they follow a grammar: compiled beside the steps, advanced beside them too.

Owns two threads. One compiles grammars (`Grammars`), so that none of them holds up a step. The other keeps the rows'
matchers (`RowConstraints`): a row's next mask is begun when its token is read, and waited for, within a bound, when the
row draws again. The engine core plans such a row only once its last token is back, so the mask is always the right one.
"""

from __future__ import annotations

import queue
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from engine_core.device.base import Int32, RowMask
from engine_core.errors import ProtocolViolation, describe_chain
from engine_core.ops.masks import MaskWords
from engine_core.step import GrammarPrepared
from engine_core.worker.grammar import (
    GrammarError,
    Vocabulary,
    advance,
    mask_of,
    start_deep_thread,
)
from engine_core.worker.grammar_check import GrammarCheck
from engine_core.worker.unconstrained import Refused

MASKS_S = 1.0
"""How long all rows of a step together may wait for their masks; a row whose mask is later is refused."""
KEPT_GRAMMARS = 16
"""Compiled grammars that are kept for the next request with the same text."""


class Grammars:
    """Compiled grammars by key. One thread compiles; `wake` is called from it when there is an outcome."""

    def __init__(self, vocabulary: Vocabulary, check: GrammarCheck, wake: Callable[[], None]) -> None:
        self._vocabulary = vocabulary
        self._check = check
        self._wake = wake
        self._tasks: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
        self._outcomes: deque[tuple[int, LLMatcher | str]] = deque()
        self._by_key: dict[int, LLMatcher] = {}
        self._by_text: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        """The compiling thread's own."""
        self._asked: set[int] = set()
        start_deep_thread("grammars", self._compile)

    def prepare(self, key: int, kind: str, text: str) -> None:
        """Compile a grammar; `outcomes` has the outcome later."""
        self._asked.add(key)
        self._tasks.put((key, kind, text))

    def forget(self, key: int) -> None:
        """No row will start with it any more."""
        self._asked.discard(key)
        self._by_key.pop(key, None)

    def outcomes(self) -> list[GrammarPrepared]:
        """What came of grammars since the last call."""
        prepared: list[GrammarPrepared] = []
        while self._outcomes:
            key, outcome = self._outcomes.popleft()
            if isinstance(outcome, str):
                prepared.append(GrammarPrepared(key, outcome))
                continue
            if key in self._asked:
                self._by_key[key] = outcome
            prepared.append(GrammarPrepared(key))
        return prepared

    def find(self, key: int) -> LLMatcher:
        """At its start; copy it. Raises ProtocolViolation for a grammar that isn't prepared."""
        matcher = self._by_key.get(key)
        if matcher is None:
            raise ProtocolViolation(f"a row follows grammar {key}, which isn't prepared")
        return matcher

    # -------------------------- on the compiling thread

    def _compile(self) -> None:
        while True:
            key, kind, text = self._tasks.get()
            try:
                outcome: LLMatcher | str = self._compiled(kind, text)
            except GrammarError as error:
                outcome = str(error)
            except BaseException as error:  # a panic of llguidance isn't an Exception, and costs one request
                outcome = describe_chain(error)
            self._outcomes.append((key, outcome))
            self._wake()

    def _compiled(self, kind: str, text: str) -> LLMatcher:
        matcher = self._by_text.pop((kind, text), None)
        if matcher is None:
            self._check.check(kind, text)
            matcher = self._vocabulary.matcher(kind, text)
        self._by_text[kind, text] = matcher
        if len(self._by_text) > KEPT_GRAMMARS:
            self._by_text.popitem(last=False)
        return matcher


class _Row:
    """A row's matcher, which belongs to the matching thread, and the mask for its next token."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.matcher: LLMatcher | None = None
        self.mask: Future[MaskWords] = Future()


class RowConstraints:
    """The `Constraints` of a model whose vocabulary is known."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._rows: dict[int, _Row] = {}
        self._tasks: queue.SimpleQueue[tuple[Future[MaskWords], Callable[[], LLMatcher]]] = queue.SimpleQueue()
        start_deep_thread("masks", self._match)

    def prepare(self, key: int, kind: str, text: str) -> None:
        self._grammars.prepare(key, kind, text)

    def outcomes(self) -> list[GrammarPrepared]:
        return self._grammars.outcomes()

    def start(self, slot: int, key: int, output: Int32) -> None:
        self._rows.pop(slot, None)
        if not key:
            return
        template, row = self._grammars.find(key), _Row(key)
        self._rows[slot] = row
        drawn = output.tolist()

        def begin() -> LLMatcher:
            matcher = row.matcher = template.deep_copy()
            advance(matcher, drawn)
            return matcher

        self._tasks.put((row.mask, begin))

    def forget(self, key: int) -> None:
        self._grammars.forget(key)
        self._rows = {slot: row for slot, row in self._rows.items() if row.key != key}

    def masks(self, slots: Int32) -> tuple[list[RowMask], list[Refused]]:
        masks: list[RowMask] = []
        refused: list[Refused] = []
        if not self._rows:
            return masks, refused
        deadline = time.monotonic() + MASKS_S
        for index, slot in enumerate(slots.tolist()):
            row = self._rows.get(slot)
            if row is None:
                continue
            try:
                mask = row.mask.result(max(0.0, deadline - time.monotonic()))
                masks.append(RowMask(index, mask))
            except GrammarError as error:
                refused.append((slot, str(error)))
            except TimeoutError:
                refused.append((slot, f"what may come next wasn't found within {MASKS_S:g} s"))
        return masks, refused

    def drawn(self, slots: Int32, tokens: npt.NDArray[np.int32]) -> None:
        if not self._rows:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            row = self._rows.get(slot)
            if row is not None:
                row.mask = Future()
                self._tasks.put((row.mask, _step(row, token)))

    # -------------------------- on the matching thread

    def _match(self) -> None:
        while True:
            mask, work = self._tasks.get()
            try:
                mask.set_result(mask_of(work()))
            except BaseException as error:  # a panic of llguidance isn't an Exception, and costs one row
                mask.set_exception(error if isinstance(error, GrammarError) else GrammarError(describe_chain(error)))


def _step(row: _Row, token: int) -> Callable[[], LLMatcher]:
    def step() -> LLMatcher:
        matcher = row.matcher
        if matcher is None:
            raise GrammarError("the row has no matcher")
        advance(matcher, [token])
        return matcher

    return step


def open_grammars(
    folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], wake: Callable[[], None]
) -> RowConstraints | str:
    """What rows of this model follow, or why they can't follow any grammar."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return "the model's folder has no tokenizer.json"
    eos = [token for token in eos_token_ids if 0 <= token < vocab_size]
    if not eos:
        return "the model has no eos id, with which such an output would end"
    try:
        vocabulary = Vocabulary(str(file), vocab_size, eos)
    except ValueError as error:
        return f"llguidance can't read the model's tokenizer: {error}"
    return RowConstraints(Grammars(vocabulary, GrammarCheck(str(file), vocab_size, eos), wake))
