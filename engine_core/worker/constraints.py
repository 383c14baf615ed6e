"""What rows may draw next, where they follow a grammar: compiled beside the steps, advanced beside them too.

Owns three threads. Two compile grammars (`Grammars`), so that none of them holds up a step. The other keeps the rows'
matchers (`RowConstraints`): a row's next mask is begun when its token is read, and is there, as a rule, when the row
draws again; a row whose mask isn't is late (`late_rows.py`). The engine core plans such a row only once its last token
is back, so the mask is always the right one.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
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
from engine_core.worker.grammar_check import CHECK_S, GrammarCheck, GrammarLate
from engine_core.worker.unconstrained import Refused

MASKS_S = 1.0
"""How long a row may be late; then it is refused."""
WAIT_S = 2e-4
"""How long a launch waits for the masks of all its rows together. A mask takes 0.02 ms as a rule, but its thread needs
the interpreter for it, which launches that never waited could keep to themselves. It is a small part of a step."""
QUICK_S = 0.3
"""In which nearly every grammar can be tried. One that can't is tried again, behind others of its kind."""
KEPT_GRAMMARS = 16
"""Compiled grammars that are kept for the next request with the same text."""


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled grammar at its start, to be copied, and what may come first."""

    matcher: LLMatcher
    first: MaskWords


@dataclass(frozen=True, slots=True)
class _Task:
    """A grammar to compile."""

    key: int
    kind: str
    text: str


class Grammars:
    """Compiled grammars by key; `wake` is called from the compiling threads when there is an outcome.

    What isn't tried within QUICK_S goes on to the second thread, where slow grammars wait for one another; each has
    cost the others QUICK_S and the start of another child. What nobody waits for any more isn't compiled.
    """

    def __init__(
        self, vocabulary: Vocabulary, quick: GrammarCheck, thorough: GrammarCheck, wake: Callable[[], None]
    ) -> None:
        """The checks are those of the first and of the second thread."""
        self._vocabulary = vocabulary
        self._wake = wake
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._slow_tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._outcomes: deque[tuple[int, Template | str]] = deque()
        self._by_key: dict[int, Template] = {}
        self._by_text: OrderedDict[tuple[str, str], Template] = OrderedDict()
        """Of the compiling threads, under the lock."""
        self._lock = threading.Lock()
        self._asked: set[int] = set()
        start_deep_thread("grammars", lambda: self._compile_all(self._tasks, quick))
        start_deep_thread("slow grammars", lambda: self._compile_all(self._slow_tasks, thorough))

    def prepare(self, key: int, kind: str, text: str) -> None:
        """Compile a grammar; `outcomes` has the outcome later."""
        self._asked.add(key)
        self._tasks.put(_Task(key, kind, text))

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

    def find(self, key: int) -> Template:
        """Raises ProtocolViolation for a grammar that isn't prepared."""
        template = self._by_key.get(key)
        if template is None:
            raise ProtocolViolation(f"a row follows grammar {key}, which isn't prepared")
        return template

    # -------------------------- on the compiling threads

    def _compile_all(self, tasks: queue.SimpleQueue[_Task], check: GrammarCheck) -> None:
        is_slow = tasks is self._slow_tasks
        while True:
            task = tasks.get()
            if task.key not in self._asked:
                continue
            try:
                outcome: Template | str = self._compiled(task, check, CHECK_S if is_slow else QUICK_S)
            except GrammarLate as late:
                if not is_slow:
                    self._slow_tasks.put(task)
                    continue
                outcome = str(late)
            except GrammarError as error:
                outcome = str(error)
            except BaseException as error:  # a panic of llguidance isn't an Exception, and costs one request
                outcome = describe_chain(error)
            self._outcomes.append((task.key, outcome))
            self._wake()

    def _compiled(self, task: _Task, check: GrammarCheck, within: float) -> Template:
        known = (task.kind, task.text)
        with self._lock:
            template = self._by_text.pop(known, None)
        if template is None:
            check.check(task.kind, task.text, within)
            matcher = self._vocabulary.matcher(task.kind, task.text)
            template = Template(matcher, mask_of(matcher))
        with self._lock:
            self._by_text[known] = template
            if len(self._by_text) > KEPT_GRAMMARS:
                self._by_text.popitem(last=False)
        return template


class _Row:
    """A row's matcher, which belongs to the matching thread, and the mask for its next token."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.matcher: LLMatcher | None = None
        self.mask: Future[MaskWords] = Future()
        self.late_until: float | None = None
        """Set once the mask is late."""

    def is_masked(self, within: float) -> bool:
        """Whether the mask, or its error, is there or comes within these seconds."""
        if self.mask.done():
            return True
        try:
            self.mask.exception(within)
        except TimeoutError:
            return False
        return True


class RowConstraints:
    """The `Constraints` of a model whose vocabulary is known."""

    def __init__(self, grammars: Grammars, wake: Callable[[], None], now: Callable[[], float]) -> None:
        """`wake` is called from the matching thread when a late mask is there."""
        self._grammars = grammars
        self._wake = wake
        self._now = now
        self._rows: dict[int, _Row] = {}
        self._tasks: queue.SimpleQueue[tuple[Future[MaskWords] | None, Callable[[], LLMatcher]]] = queue.SimpleQueue()
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
        wanted = row.mask if drawn else None
        if wanted is None:  # in time for a draw in this very step
            row.mask.set_result(template.first)

        def begin() -> LLMatcher:
            matcher = row.matcher = template.matcher.deep_copy()
            advance(matcher, drawn)
            return matcher

        self._tasks.put((wanted, begin))

    def forget(self, key: int) -> None:
        self._grammars.forget(key)
        self._rows = {slot: row for slot, row in self._rows.items() if row.key != key}

    def late(self, slots: Int32) -> list[int]:
        late: list[int] = []
        if not self._rows:
            return late
        now = self._now()
        for slot in slots.tolist():
            row = self._rows.get(slot)
            if row is None or row.is_masked(max(0.0, now + WAIT_S - self._now())):
                continue
            if row.late_until is None:
                row.late_until = now + MASKS_S
                row.mask.add_done_callback(lambda _: self._wake())
            if row.late_until > now:
                late.append(slot)
        return late

    def awaited_until(self, slot: int) -> float | None:
        row = self._rows.get(slot)
        return None if row is None or row.mask.done() else row.late_until

    def masks(self, slots: Int32) -> tuple[list[RowMask], list[Refused]]:
        masks: list[RowMask] = []
        refused: list[Refused] = []
        if not self._rows:
            return masks, refused
        for index, slot in enumerate(slots.tolist()):
            row = self._rows.get(slot)
            if row is None:
                continue
            if not row.mask.done():
                refused.append((slot, f"what may come next wasn't found within {MASKS_S:g} s"))
            elif (error := row.mask.exception()) is not None:
                refused.append((slot, str(error)))
            else:
                masks.append(RowMask(index, row.mask.result()))
        return masks, refused

    def drawn(self, slots: Int32, tokens: npt.NDArray[np.int32]) -> None:
        if not self._rows:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            row = self._rows.get(slot)
            if row is not None:
                row.mask, row.late_until = Future(), None
                self._tasks.put((row.mask, _step(row, token)))

    # -------------------------- on the matching thread

    def _match(self) -> None:
        while True:
            wanted, work = self._tasks.get()
            try:
                matcher = work()
                if wanted is not None:
                    wanted.set_result(mask_of(matcher))
            except BaseException as error:  # a panic of llguidance isn't an Exception, and costs one row
                known = error if isinstance(error, GrammarError) else GrammarError(describe_chain(error))
                if wanted is not None:
                    wanted.set_exception(known)


def _step(row: _Row, token: int) -> Callable[[], LLMatcher]:
    def step() -> LLMatcher:
        matcher = row.matcher
        if matcher is None:
            raise GrammarError("the row has no matcher")
        advance(matcher, [token])
        return matcher

    return step


def open_grammars(
    folder: Path,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    wake: Callable[[], None],
    now: Callable[[], float],
) -> RowConstraints | str:
    """What rows of this model follow, or why they can't follow any grammar. Other threads `wake` the worker's."""
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
    quick, thorough = (GrammarCheck(str(file), vocab_size, eos) for _ in range(2))
    grammars = Grammars(vocabulary, quick, thorough, wake)
    return RowConstraints(grammars, wake, now)
