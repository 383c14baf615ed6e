"""Incremental detokenization equals the full decode, whatever the ids and the kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from frontend.detokenizer import MAX_HELD, Detokenizers
from frontend.tokenizer import Tokenizer
from tests.unit.scripted_engine import FIXTURE

SPECIAL = "<s>"
REPLACEMENT_WORD = 6
"""Id of the word U+FFFD in `word_level`."""


def byte_level() -> tokenizers.Tokenizer:
    """The fixture's byte-level BPE, with added tokens that are no byte-level words."""
    backend = tokenizers.Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
    backend.add_tokens(["é", "two words", "日本", "Ġ"])
    return backend


def byte_fallback(strip: int = 1) -> tokenizers.Tokenizer:
    """A vocabulary in Llama 2's style: metaspace words, a token for each byte, the first space stripped."""
    words = ["<unk>", SPECIAL, "▁", "▁the", "▁▁", "é", "日", "a", "▁b", "<0xZZ>", ""]
    vocabulary = {word: index for index, word in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        stages.append(decoders.Strip(" ", strip, 0))
    backend.decoder = decoders.Sequence(stages)
    backend.add_special_tokens([SPECIAL, "<unk>"])
    return backend


def word_level(decoder: decoders.Decoder | None = None) -> tokenizers.Tokenizer:
    """A vocabulary of words, joined by spaces where no decoder says otherwise."""
    words = ["<unk>", SPECIAL, "one", "two", "##ing", "日本", "�", "do", "n't", ".", "▁x", "w</w>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([SPECIAL])
    return backend


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, nothing stripped": lambda: byte_fallback(0),
    "byte fallback, three stripped": lambda: byte_fallback(3),
    "words": word_level,
    "word pieces": lambda: word_level(decoders.WordPiece()),
    "metaspace": lambda: word_level(decoders.Metaspace()),
    "suffixes": lambda: word_level(decoders.BPEDecoder()),
}
BUILT = {name: Tokenizer(build(), {}) for name, build in KINDS.items()}


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_the_pieces_are_the_full_decode(kind: str, data: st.DataObject, skip: bool) -> None:
    """Red for any loss, repetition or reordering of text; ids beyond the vocabulary included."""
    tokenizer = BUILT[kind]
    id_range = st.integers(0, tokenizer.vocab_size + 2)
    if kind == "byte level":  # mostly single bytes, so that characters are built and broken
        id_range = st.one_of(st.integers(5, 260), id_range)
    ids = data.draw(st.lists(id_range, max_size=MAX_HELD))
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(), kind=st.sampled_from(["byte level", "byte fallback"]))
def test_no_piece_holds_half_a_character(text: str, kind: str) -> None:
    """Red if a piece is released before its last character is whole."""
    tokenizer = BUILT[kind]
    data = text.replace("▁", "").encode()
    ids = list(data) if kind == "byte fallback" else single_bytes(tokenizer, data)
    shown = pieces(tokenizer, ids, True)
    assert all("�" not in piece or "�" in text for piece in shown)
    assert "".join(shown) == (
        text.replace("▁", "").removeprefix(" ") if kind == "byte fallback" else text.replace("▁", "")
    )


def single_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The id of each byte by itself."""
    by_byte = {tokenizer.token_bytes(token): token for token in range(260, 4, -1)}
    return [by_byte[bytes((byte,))] for byte in data]


@pytest.mark.parametrize("kind", list(KINDS))
def test_endless_undecodable_bytes_come_out_as_they_go_in(kind: str) -> None:
    """Case 25. Red if undecodable bytes are held for ever, or if the work grows with their number."""
    tokenizer = BUILT[kind]
    if kind == "byte level":
        (bad,) = single_bytes(tokenizer, b"\xff")
    else:
        bad = 0xFF if kind.startswith("byte fallback") else REPLACEMENT_WORD
    detokenizer = tokenizer.detokenizer(True)
    released = 0
    for count in range(1, 20 * MAX_HELD):
        released += detokenizer.push(bad).count("�")
        assert count - released <= MAX_HELD
    assert released + detokenizer.finish().count("�") == 20 * MAX_HELD - 1


def test_a_long_run_of_good_bytes_is_released_before_it_ends() -> None:
    """Red if a text made of byte tokens alone is held until its end."""
    tokenizer = BUILT["byte fallback"]
    text = "日本語" * 40
    detokenizer = tokenizer.detokenizer(True)
    shown = [detokenizer.push(byte) for byte in text.encode()]
    assert len("".join(shown)) >= len(text) - MAX_HELD / 3
    assert "".join(shown) + detokenizer.finish() == text


def test_byte_level_holds_at_most_a_character() -> None:
    """Red if the first bytes of a character are released as replacement characters, or whole characters held."""
    tokenizer = BUILT["byte level"]
    assert pieces(tokenizer, single_bytes(tokenizer, "a🙂b".encode()), True) == ["a", "", "", "", "🙂", "b", ""]


def test_skipped_tokens_in_mid_text_cost_no_space() -> None:
    """Red if a window that begins behind a skipped token takes the next word for the text's first."""
    tokenizer = BUILT["words"]
    assert pieces(tokenizer, [2, 1, 3], True) == ["one", "", " two", ""]


def test_unknown_decoders_take_the_window() -> None:
    """Red if a decoder whose effect isn't known is treated as one of the table kinds."""
    backend = byte_fallback()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("a", 1, 1)])
    detokenizer = Detokenizers(backend, []).new(False)
    assert type(detokenizer).__name__ == "WindowDetokenizer"
