"""Incremental detokenization: token ids in, text out, one push a token, never half a character.

Owns the rule that the pieces of a sequence, joined, are the full decode of its ids. Holds back only bytes that may
still become a character. Knows nothing of stop strings, requests or the engine core.

The one exception to the rule: a byte-fallback tokenizer turns *every* byte of a run into U+FFFD when any byte of the
run is wrong, so a run must be held until it ends. A run of MAX_HELD bytes that is well-formed so far is released up to
its last whole character; bytes that go wrong after that no longer change what was released.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import tokenizers

MAX_HELD = 64
"""Tokens held back at most while they form no whole character."""
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one sequence, as its tokens arrive."""

    def push(self, token: int) -> str:
        """The text that this token completes; ids outside the tokenizer's vocabulary have none."""

    def finish(self) -> str:
        """What was held back, undecodable bytes as U+FFFD. Nothing may be pushed afterwards."""


# ------------------------------ byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM …)


@dataclass(frozen=True, slots=True)
class ByteTable:
    """What each id of a byte-level vocabulary stands for."""

    data: list[bytes]
    texts: list[str | None]
    """The bytes as text, None where they are no whole characters by themselves."""

    def without(self, ids: Collection[int]) -> ByteTable:
        """The same table with no text for these ids."""
        data, texts = self.data.copy(), self.texts.copy()
        for token in ids:
            data[token], texts[token] = b"", ""
        return ByteTable(data, texts)


class ByteLevelDetokenizer:
    """Tokens are byte strings of UTF-8: at most three bytes are ever held."""

    __slots__ = ("_held", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._held = b""

    def push(self, token: int) -> str:
        try:
            if not self._held:
                text = self._table.texts[token]
                if text is not None:
                    return text
            data = self._held + self._table.data[token]
        except IndexError:
            return ""
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte (GPT-2's bytes_to_unicode, inverted)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in alphabet.values()]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


def _byte_table(tokens: list[str | None]) -> ByteTable:
    alphabet = _byte_alphabet()
    data: list[bytes] = []
    texts: list[str | None] = []
    for token in tokens:
        try:
            raw = bytes([alphabet[char] for char in token or ""])
        except KeyError:  # an added token: written as it is
            raw = (token or "").encode()
        data.append(raw)
        try:
            texts.append(raw.decode())
        except UnicodeDecodeError:
            texts.append(None)
    return ByteTable(data, texts)


# ------------------------------ byte fallback (Llama 2, Mistral, Gemma, TinyLlama …)


@dataclass(frozen=True, slots=True)
class FallbackTable:
    """What each id of a byte-fallback vocabulary stands for: text, a byte (int) or nothing (None)."""

    pieces: list[str | int | None]
    strip: int
    """Spaces taken from the start of the whole text."""

    def without(self, ids: Collection[int]) -> FallbackTable:
        """The same table with nothing for these ids."""
        pieces = self.pieces.copy()
        for token in ids:
            pieces[token] = None
        return FallbackTable(pieces, self.strip)


class FallbackDetokenizer:
    """Tokens are text, or single bytes whose runs are text only if the whole run is UTF-8."""

    __slots__ = ("_decoder", "_run", "_strip", "_table", "_text", "_wrong")

    def __init__(self, table: FallbackTable) -> None:
        self._table = table
        self._strip = table.strip
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._run = 0  # bytes held
        self._text = ""  # what they decode to so far
        self._wrong = False  # the run can't become UTF-8 any more

    def push(self, token: int) -> str:
        try:
            piece = self._table.pieces[token]
        except IndexError:
            return ""
        if piece is None:
            return ""
        if isinstance(piece, int):
            return self._stripped(self._byte(piece))
        if self._run or self._wrong:
            piece = self._end_run() + piece
        return self._stripped(piece) if self._strip else piece

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _byte(self, byte: int) -> str:
        if self._wrong:
            return REPLACEMENT
        self._run += 1
        try:
            self._text += self._decoder.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._wrong = True
            released, self._run = self._run, 0
            return REPLACEMENT * released
        if self._run < MAX_HELD:
            return ""
        released_text, self._text = self._text, ""
        self._run = len(self._decoder.getstate()[0])
        return released_text

    def _end_run(self) -> str:
        incomplete = bool(self._decoder.getstate()[0])
        text = REPLACEMENT * self._run if incomplete or self._wrong else self._text
        self._decoder.reset()
        self._run, self._text, self._wrong = 0, "", False
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


def _fallback_table(tokens: list[str | None], replacements: list[tuple[str, str]], strip: int) -> FallbackTable:
    pieces: list[str | int | None] = []
    for token in tokens:
        if token is None:
            pieces.append(None)
            continue
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _fallback_byte(token)
        pieces.append(token if byte is None else byte)
    return FallbackTable(pieces, strip)


def _fallback_byte(token: str) -> int | None:
    """The value of a token written `<0xNN>`."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


# ------------------------------ any other decoder


class WindowDetokenizer:
    """Decodes the tokens since the last release behind those of the release before, and takes the difference.

    Only tokens that have text enter the window: a decoder treats the first token of a text differently (a space
    stripped, none put before), so a window that began with skipped tokens would lose a space in mid-text.
    """

    __slots__ = ("_decode", "_has_text", "_held", "_prefix", "_prefix_text")

    def __init__(self, decode: Callable[[list[int]], str], has_text: Callable[[int], bool]) -> None:
        self._decode = decode
        self._has_text = has_text
        self._prefix: list[int] = []
        self._prefix_text = ""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        if not self._has_text(token):
            return ""
        self._held.append(token)
        text = self._decode(self._prefix + self._held)
        settled = text.startswith(self._prefix_text) and not text.endswith(REPLACEMENT)
        if not settled and len(self._held) < MAX_HELD:
            return ""
        return self._release(text)

    def finish(self) -> str:
        return self._release(self._decode(self._prefix + self._held)) if self._held else ""

    def _release(self, text: str) -> str:
        new = text[len(self._prefix_text) :]
        self._prefix, self._held = self._held, []
        self._prefix_text = self._decode(self._prefix)
        return new


# ------------------------------ choice


class Detokenizers:
    """Makes the detokenizers of one tokenizer and holds the tables that they share (two lists an id)."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: Collection[int]) -> None:
        self._backend = backend
        self._special = frozenset(special_ids)
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._tokens = [backend.id_to_token(token) for token in range(size)]
        self._table = _table_of(backend, self._tokens)
        self._skipping = self._table.without(self._special) if self._table is not None else None

    def new(self, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for one sequence."""
        table = self._skipping if skip_special_tokens else self._table
        if isinstance(table, ByteTable):
            return ByteLevelDetokenizer(table)
        if isinstance(table, FallbackTable):
            return FallbackDetokenizer(table)
        dropped = self._special if skip_special_tokens else frozenset[int]()
        return WindowDetokenizer(
            lambda ids: self._backend.decode(ids, skip_special_tokens=False),
            lambda token: token not in dropped and token < len(self._tokens) and self._tokens[token] is not None,
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id contributes to a text; empty for ids outside the vocabulary."""
        if not 0 <= token < len(self._tokens) or self._tokens[token] is None:
            return b""
        if isinstance(self._table, ByteTable):
            return self._table.data[token]
        if isinstance(self._table, FallbackTable):
            piece = self._table.pieces[token]
            return bytes((piece,)) if isinstance(piece, int) else (piece or "").encode()
        return self._backend.decode([token], skip_special_tokens=False).encode()


def _table_of(backend: tokenizers.Tokenizer, tokens: list[str | None]) -> ByteTable | FallbackTable | None:
    """The table for decoders whose effect on each token is known; None: only the library can tell."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    stages = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return _byte_table(tokens)
    replacements: list[tuple[str, str]] = []
    while kinds[:1] == ["Replace"] and "String" in stages[0]["pattern"]:
        replacements.append((stages[0]["pattern"]["String"], stages[0]["content"]))
        stages, kinds = stages[1:], kinds[1:]
    if kinds == ["ByteFallback", "Fuse"]:
        return _fallback_table(tokens, replacements, strip=0)
    if kinds == ["ByteFallback", "Fuse", "Strip"] and stages[2]["content"] == " " and stages[2]["stop"] == 0:
        return _fallback_table(tokens, replacements, strip=stages[2]["start"])
    return None
