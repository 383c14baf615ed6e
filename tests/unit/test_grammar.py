"""Grammars on the worker's side: dialects, bounds, the process that tries them, and the masks of rows."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine_core.errors import ProtocolViolation
from engine_core.ops.masks import MaskWords, allowed_ids
from engine_core.step import GrammarPrepared
from engine_core.worker import constraints as module
from engine_core.worker.constraints import RowConstraints, open_grammars
from engine_core.worker.grammar import GrammarError, Vocabulary, advance, mask_of
from engine_core.worker.grammar_check import CHECK_S, GrammarCheck, GrammarLate

TINY = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen"
FILE = str(TINY / "tokenizer.json")
VOCAB, EOS = 4096, 2
TOKENIZER = Tokenizer.from_file(FILE)
AGE = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"]}
TAG = {"structures": [{"begin": "<f>", "schema": AGE, "end": "</f>"}], "triggers": ["<f>"]}
ENDLESS = "start: X\nX: " + " & ".join(f"/.*w{i}.*/" for i in range(30))
DEEP = json.dumps(
    {"$defs": {f"d{i}": {"properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1500)} | {"d1500": {}}}
    | {"$ref": "#/$defs/d0"}
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(FILE, VOCAB, [EOS])


@pytest.fixture
def check() -> Iterator[GrammarCheck]:
    check = GrammarCheck(FILE, VOCAB, [EOS])
    yield check
    check.close()


def drawn(vocabulary: Vocabulary, kind: str, text: str, seed: int) -> str:
    """A text whose tokens are drawn evenly from the masks, up to eos."""
    matcher, random, ids = vocabulary.matcher(kind, text), np.random.default_rng(seed), list[int]()
    while len(ids) < 400:
        token = int(random.choice(np.flatnonzero(allowed_ids(mask_of(matcher), VOCAB))))
        if token == EOS:
            return TOKENIZER.decode(ids)
        ids.append(token)
        advance(matcher, [token])
    raise AssertionError(f"no end after {len(ids)} tokens")


@pytest.mark.parametrize(
    ("kind", "text", "fits"),
    [
        ("json_schema", json.dumps(AGE | {"additionalProperties": False}), r'\s*\{\s*"age"\s*:\s*\d\d?\s*\}\s*'),
        ("regex", "[A-Z][a-z]{2,5} [0-9]{1,3}", "[A-Z][a-z]{2,5} [0-9]{1,3}"),
        ("choice", '["yes", "no \\"quoted\\"", "h\\u00e9"]', 'yes|no "quoted"|hé'),
        ("choice", json.dumps([f"c{i}" for i in range(4096)]), r"c\d{1,4}"),
        ("lark", 'start: "a" b+\nb: "b" | "c"', "a[bc]+"),
        ("lark", 'root ::= "a" ("b" | "c")+', "a[bc]+"),
    ],
)
def test_every_text_drawn_fits(vocabulary: Vocabulary, kind: str, text: str, fits: str) -> None:
    """Red when a dialect is read as another one, or masks allow what the grammar doesn't."""
    for seed in range(12):
        assert re.fullmatch(fits, drawn(vocabulary, kind, text, seed)), seed


def test_structural_tags_allow_text_and_bind_what_follows_a_trigger(vocabulary: Vocabulary) -> None:
    """Red when free text is refused, or something else than the schema's value may follow `begin`."""
    ids = TOKENIZER.encode('It is <f>{"age": 7}</f> she said', add_special_tokens=False).ids
    advance(vocabulary.matcher("structural_tag", json.dumps(TAG)), ids)
    with pytest.raises(GrammarError):
        advance(
            vocabulary.matcher("structural_tag", json.dumps(TAG)),
            TOKENIZER.encode('<f>{"age": "seven', add_special_tokens=False).ids,
        )


def test_blanks_in_json_are_bounded(vocabulary: Vocabulary) -> None:
    """Red when a model may fill its answer with blanks: a small one does, up to max_tokens."""
    for text, taken in (('{\n    "age": 7\n}', True), ('{"age":' + " " * 30 + "7}", False), ('{"age":\n\n7}', False)):
        matcher = vocabulary.matcher("json_schema", json.dumps(AGE))
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
        assert (matcher.try_consume_tokens(ids) == len(ids)) is taken, text


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "a(", "unclosed group"),
        ("lark", "start: nobody", "nobody"),
        ("json_schema", "{", "ValueError"),
        ("json_schema", '{"type": "nothing"}', "nothing"),
        ("choice", "[]", "choice"),
        ("choice", '[1, ""]', "choice"),
        ("structural_tag", '{"structures": []}', "structures"),
        ("structural_tag", json.dumps(TAG | {"triggers": ["<g>"]}), "<f>"),
        ("structural_tag", '{"structures": [{}], "triggers": ["a"]}', "begin"),
        ("json_schema", '{"$ref": "#"}', "no text can follow it"),
    ],
)
def test_a_bad_grammar_says_why(vocabulary: Vocabulary, kind: str, text: str, says: str) -> None:
    """Red when what a client got wrong raises anything but GrammarError, or the message doesn't help."""
    with pytest.raises(GrammarError, match=re.escape(says)):
        vocabulary.matcher(kind, text)


@pytest.mark.parametrize(("kind", "text"), [("lark", ENDLESS), ("regex", "(" * 30_000 + "a" + ")" * 30_000)])
def test_an_explosive_grammar_is_bounded(check: GrammarCheck, kind: str, text: str) -> None:
    """Red when such a grammar takes this process with it, runs on, or spoils the check of the next one."""
    check.check("regex", "a+")
    started = time.monotonic()
    with pytest.raises(GrammarError):
        check.check(kind, text)
    assert time.monotonic() - started < CHECK_S + 5
    check.check("regex", "a+")


def test_a_deep_grammar_has_the_stack_it_needs(check: GrammarCheck) -> None:
    """Red when the grammar threads get the usual stack: this schema overflows 8 MiB."""
    check.check("json_schema", DEEP)


def test_a_late_answer_is_the_end_of_the_child(check: GrammarCheck) -> None:
    """Red when a grammar that takes too long isn't refused in time, or the child that works on it is used again."""
    check.check("regex", "a+")
    with pytest.raises(GrammarLate, match="within 0 s"):
        check.check("json_schema", DEEP, within=0)
    check.check("regex", "a+")


# ------------------------------ beside the steps


class Rows:
    """Grammars and rows of one worker."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.now = 0.0
        opened = open_grammars(TINY, VOCAB, (EOS,), self.woken.set, lambda: self.now)
        assert isinstance(opened, RowConstraints)
        self.rows = opened

    def prepare(self, key: int, kind: str, text: str) -> GrammarPrepared:
        self.woken.clear()
        self.rows.prepare(key, kind, text)
        assert self.woken.wait(60)
        self.woken.clear()
        (outcome,) = self.rows.outcomes()
        return outcome

    def await_masks(self, *slots: int) -> None:
        """What a worker does until its rows aren't late any more."""
        while late := self.rows.late(np.array(slots, np.int32)):
            while any(self.rows.awaited_until(slot) is not None for slot in late):
                assert self.woken.wait(60)
                self.woken.clear()

    def allowed(self, *slots: int) -> list[list[str]]:
        self.await_masks(*slots)
        masks, refused = self.rows.masks(np.array(slots, np.int32))
        assert refused == []
        return [
            [str(TOKENIZER.id_to_token(int(id))) for id in np.flatnonzero(allowed_ids(mask.words, VOCAB))]
            for mask in masks
        ]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows()


def ids(*tokens: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([TOKENIZER.token_to_id(token) for token in tokens], np.int32)


def test_a_row_follows_its_grammar_to_eos(rows: Rows) -> None:
    """Red when a mask isn't that of the row's own last token, or siblings share what they drew."""
    assert rows.prepare(1, "regex", "[ab][cd]") == GrammarPrepared(1)
    for slot in (0, 2):
        rows.rows.start(slot, 1, np.empty(0, np.int32))
    rows.rows.start(1, 0, np.empty(0, np.int32))
    assert all({"a", "b"} <= set(allowed) for allowed in rows.allowed(0, 2))
    assert [mask.row for mask in rows.rows.masks(np.array([2, 1, 0], np.int32))[0]] == [0, 2]
    rows.rows.drawn(np.array([0, 1], np.int32), ids("a", "c"))
    assert [set(allowed) for allowed in rows.allowed(0)] == [{"c", "d"}]
    assert {"a", "b"} <= set(rows.allowed(2)[0])
    rows.rows.drawn(np.array([0], np.int32), ids("d"))
    assert rows.allowed(0) == [["<|im_end|>"]]
    rows.rows.drawn(np.array([2], np.int32), ids("b"))
    assert [set(allowed) for allowed in rows.allowed(2)] == [{"c", "d"}]
    rows.rows.forget(1)
    assert rows.allowed(0, 1, 2) == []


def test_a_preempted_row_goes_on_where_it_was(rows: Rows) -> None:
    """Red when a row that comes back starts its grammar anew."""
    assert rows.prepare(2, "regex", "abcdef").error is None
    rows.rows.start(3, 2, ids("a", "b"))
    assert all(token.startswith("c") for token in rows.allowed(3)[0])


def test_outcomes(rows: Rows) -> None:
    """Red when a bad grammar has no outcome, or a row may start with one that was refused, forgotten or unknown."""
    error = rows.prepare(3, "regex", "a(").error
    assert error is not None
    assert "unclosed group" in error
    assert rows.prepare(4, "regex", "a").error is None
    rows.rows.forget(4)
    for key in (3, 4, 77):
        with pytest.raises(ProtocolViolation):
            rows.rows.start(0, key, np.empty(0, np.int32))


def test_a_row_beyond_its_grammar_is_refused(rows: Rows) -> None:
    """Red when a matcher's error ends the thread, or is taken for a mask."""
    assert rows.prepare(5, "regex", "ab").error is None
    for slot in (5, 6):
        rows.rows.start(slot, 5, np.empty(0, np.int32))
    rows.rows.drawn(np.array([5], np.int32), ids("z"))
    rows.await_masks(5, 6)
    masks, refused = rows.rows.masks(np.array([5, 6], np.int32))
    assert [slot for slot, _ in refused] == [5]
    assert [mask.row for mask in masks] == [1]


class Gate:
    """`mask_of`, kept back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._opened, self._mask_of = threading.Event(), mask_of
        self.asked = 0
        monkeypatch.setattr(module, "mask_of", self._wait)

    def _wait(self, matcher: LLMatcher) -> MaskWords:
        self.asked += 1
        assert self._opened.wait(60)
        return self._mask_of(matcher)

    def open(self) -> None:
        self._opened.set()


def test_a_late_mask_is_announced(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a row without its mask may draw, its worker isn't woken for it, or a row beside it is late too."""
    assert rows.prepare(6, "regex", "abc").error is None
    for slot in (7, 8):
        rows.rows.start(slot, 6, np.empty(0, np.int32))
    gate = Gate(monkeypatch)
    slots = np.array([7, 8], np.int32)
    assert rows.rows.late(slots) == [], "the first masks came with the grammar"
    rows.rows.drawn(slots[:1], ids("a"))
    rows.woken.clear()
    assert rows.rows.late(slots) == [7]
    assert rows.rows.awaited_until(7) == rows.now + module.MASKS_S
    assert rows.rows.awaited_until(8) is None
    assert not rows.woken.is_set()
    gate.open()
    assert rows.woken.wait(60)
    assert rows.rows.awaited_until(7) is None
    assert all(token.startswith("b") for token in rows.allowed(7)[0])
    assert gate.asked == 1


def test_a_row_that_is_late_for_too_long_is_refused(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a row is late for ever, or each plan gives it its time anew."""
    assert rows.prepare(9, "regex", "abc").error is None
    gate = Gate(monkeypatch)
    rows.rows.start(9, 9, ids("a"))
    slot = np.array([9], np.int32)
    began = rows.now
    assert rows.rows.late(slot) == [9]
    rows.now = began + 0.9 * module.MASKS_S
    assert rows.rows.late(slot) == [9]
    assert rows.rows.awaited_until(9) == began + module.MASKS_S
    rows.now = began + module.MASKS_S
    assert rows.rows.late(slot) == []
    assert rows.rows.masks(slot) == ([], [(9, "what may come next wasn't found within 1 s")])
    gate.open()


def test_folders_without_what_it_takes(tmp_path: Path) -> None:
    """Red when a worker that can't serve grammars doesn't start, or doesn't say why it can't."""
    assert "tokenizer.json" in str(open_grammars(tmp_path, VOCAB, (EOS,), print, time.monotonic))
    assert "eos" in str(open_grammars(TINY, VOCAB, (), print, time.monotonic))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "llguidance" in str(open_grammars(tmp_path, VOCAB, (EOS,), print, time.monotonic))
