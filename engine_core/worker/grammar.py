"""Grammars through llguidance: from a client's text to a matcher that says which tokens may come next.

Owns the dialects, the limits under which llguidance works, and the reading of its errors. A matcher never raises for
what a grammar does: it turns into an error state, which becomes a `GrammarError` here.

llguidance bounds most of its work by fuel, and recurses as deep as a grammar does. So it runs on threads with a stack
for the deepest grammar that a request can hold, and a grammar is tried in a process of its own first
(`grammar_check.py`): some operations on regular expressions have no bound.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from

from engine_core.ops.masks import MaskWords

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=10_000,
    max_grammar_size=100_000,
    verbose_errors=False,  # they would quote what was generated
)
"""Some 10 ms of lexer and parser a token and 20 MB of lexer states, at the most; a mask takes 0.02 ms as a rule."""
STACK_BYTES = 512 << 20
"""Of address space. A chain of 4,500 definitions, as many as fit into a request, takes about a fifth of it."""
MAX_MESSAGE_CHARS = 1000
WHITESPACE = r"\r?\n[ \t]{0,40}|[ \t]{1,4}"
"""Between the tokens of JSON, unless the schema says otherwise (`x-guidance`). Without a bound a small model may go on
with blanks until its tokens are used up."""


class GrammarError(Exception):
    """A grammar that can't be compiled, or allows nothing any more; the message is for its client."""


class Vocabulary:
    """The model's tokens as llguidance needs them."""

    def __init__(self, tokenizer_file: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        """`vocab_size`: of the model's logits. Takes about 0.3 s for 150,000 tokens. Raises ValueError."""
        self._tokenizer = LLTokenizer(tokenizer_file, n_vocab=vocab_size, eos_token=eos_token_ids)

    def matcher(self, kind: str, text: str) -> LLMatcher:
        """A matcher at the grammar's start, its first mask allowing something. Raises GrammarError."""
        try:
            source = self._source(kind, text)
        except (ValueError, TypeError, AssertionError, KeyError, RecursionError) as error:
            raise GrammarError(_cut(f"{type(error).__name__}: {error}")) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        mask_of(matcher)
        return matcher

    def _source(self, kind: str, text: str) -> str:
        """The grammar in llguidance's own words."""
        if kind == "structural_tag":
            return self._structural_tag(json.loads(text))
        if kind == "choice":
            choices = json.loads(text)
            if not choices or not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
                raise ValueError("choice must be a list of strings, none of them empty")
            # one lexeme: as alternatives of a rule, each would count as an item of the parser's rows
            return grammar_from("grammar", "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})
        return grammar_from("grammar" if kind == "lark" else kind, text)  # type: ignore[arg-type]  # the stubs list the kinds

    def _structural_tag(self, spec: dict[str, object]) -> str:
        """Free text in which each trigger begins one of the structures."""
        structures, triggers = spec.get("structures"), spec.get("triggers")
        if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
            raise ValueError("a structural tag needs lists of structures and triggers")
        tags = []
        for one in structures:
            trigger = next((t for t in triggers if one["begin"].startswith(t)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins {one['begin']!r}")
            tags.append(StructTag(trigger=trigger, begin=one["begin"], grammar=one["schema"], end=one["end"]))
        return StructTag.to_grammar(tags, assume_special=all(self._is_special(tag.trigger) for tag in tags))

    def _is_special(self, text: str) -> bool:
        ids = self._tokenizer.tokenize_str(text, parse_special=True)
        return len(ids) == 1 and self._tokenizer.is_special_token(ids[0])


def mask_of(matcher: LLMatcher) -> MaskWords:
    """What may come next; the eos ids alone, once nothing else can. Raises GrammarError."""
    mask = np.frombuffer(matcher.compute_bitmask(), "<u4")
    if matcher.is_error():
        raise GrammarError(_cut(matcher.get_error()))
    if not mask.any():
        raise GrammarError("no token of this model's vocabulary can follow")
    return mask


def advance(matcher: LLMatcher, tokens: list[int]) -> None:
    """The row has drawn these tokens. Raises GrammarError."""
    if not matcher.consume_tokens(tokens):
        raise GrammarError(_cut(matcher.get_error()))


def _cut(message: str) -> str:
    message = message.removesuffix("<non-verbose/>").strip()
    if message == "NoExtensionBias":  # llguidance's word for an empty language: a grammar of loops alone, for one
        message = "no text can follow it"
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + " …"


def start_deep_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """A thread on which recursion has room; it ends with the process."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
