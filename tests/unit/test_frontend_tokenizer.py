"""Reading a tokenizer, and encoding and decoding with it."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from frontend import tokenizer as module
from frontend.config import ConfigError
from frontend.request import ApiError, Code
from frontend.tokenizer import INLINE_CHARS, Tokenizer, resolve
from tests.unit.scripted_engine import FIXTURE


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FIXTURE)


def folder_with(path: Path, **config: Any) -> Path:
    """A copy of the fixture's tokenizer with another tokenizer_config.json."""
    shutil.copy(FIXTURE / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_the_fixture(tokenizer: Tokenizer) -> None:
    """Red if special ids or named tokens aren't read from the folder."""
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 2, 0)
    assert tokenizer.named_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert tokenizer.vocab_size == 4096


async def test_round_trip(tokenizer: Tokenizer) -> None:
    """Red if text changes on its way, or special tokens in a text aren't recognized."""
    text = "<|im_start|>user\nGrüße aus 東京 🙂<|im_end|>"
    ids = await tokenizer.encode(text)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "user\nGrüße aus 東京 🙂"


async def test_only_long_texts_leave_the_event_loops_thread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red if a long text blocks the event loop, or a short one pays for a thread."""
    threads: list[threading.Thread] = []
    inline = tokenizer.encode_inline

    def watched(text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return inline(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_inline", watched)
    short, long = "a" * INLINE_CHARS, "word " * INLINE_CHARS
    assert await tokenizer.encode(short) == inline(short)
    assert await tokenizer.encode(long) == inline(long)
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff", "x" * INLINE_CHARS + "\ud83d"])
async def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    """Red if invalid text reaches the library, whose error would be a 500."""
    with pytest.raises(ApiError) as refused:
        await tokenizer.encode(text)
    assert (refused.value.code, refused.value.parameter) == (Code.INVALID_ARGUMENT, "prompt")


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5]])
def test_ids_that_are_none_are_refused(tokenizer: Tokenizer, ids: list[Any]) -> None:
    """Red if the library's own exception gets out."""
    with pytest.raises(ApiError) as refused:
        tokenizer.decode(ids)
    assert refused.value.code is Code.INVALID_ARGUMENT


def test_one_token_as_text_and_bytes(tokenizer: Tokenizer) -> None:
    """Red if special tokens lose their name or partial characters their bytes."""
    ids = tokenizer.encode_inline("🙂")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🙂".encode()
    assert tokenizer.token_text(ids[0]) == "�"
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert [tokenizer.token_text(token) for token in (-1, 4096, 10**9)] == ["", "", ""]


@pytest.mark.parametrize(("wanted", "template", "starts"), [
    (True, False, True),
    (True, True, True),
    (False, True, False),
    (False, False, False),
    (None, True, True),
    (None, False, False),
])  # fmt: skip
def test_add_bos_token(wanted: bool | None, template: bool, starts: bool) -> None:
    """Red if add_bos_token is ignored, or bos comes twice where tokenizer.json adds it as well."""
    backend = tokenizers.Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    tokenizer = Tokenizer(backend, {"bos_token": {"content": "<|endoftext|>"}, "add_bos_token": wanted})
    ids = tokenizer.encode_inline("hello")
    assert ids.count(0) == int(starts)
    assert (ids[0] == 0) is starts
    assert 0 not in tokenizer.encode_inline("hello", add_special_tokens=False)


def test_truncation_and_padding_of_the_file_are_off() -> None:
    """Red if a training-time truncation in tokenizer.json cuts prompts."""
    backend = tokenizers.Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert 4 < len(Tokenizer(backend, {}).encode_inline("many words in this text here")) < 64


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    """Red if added_tokens_decoder is ignored: the token would be encoded as plain text."""
    added = {"4096": {"content": "<tool>", "special": True}, "2": {"content": "<|im_end|>", "special": True}}
    tokenizer = Tokenizer.load(folder_with(tmp_path, added_tokens_decoder=added))
    assert tokenizer.encode_inline("a<tool>b")[1] == 4096
    assert 4096 in tokenizer.special_ids


def test_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """Red if an added token silently gets another id than the model was trained with."""
    with pytest.raises(ConfigError, match="don't belong together"):
        Tokenizer.load(folder_with(tmp_path, added_tokens_decoder={"5000": {"content": "<tool>"}}))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """Red if the message doesn't name the file."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_malformed_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """Red if anything but ConfigError comes out of a broken folder."""
    folder_with(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        Tokenizer.load(tmp_path)


def test_resolve_takes_folders_and_asks_the_hub_for_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Red if weights would be fetched, or the hub's error isn't turned into advice."""
    asked: dict[str, Any] = {}

    def snapshot(model: str, allow_patterns: list[str]) -> str:
        asked.update(model=model, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(module, "snapshot_download", snapshot)
    assert resolve(str(FIXTURE)) == FIXTURE
    assert not asked
    assert resolve("some/model") == tmp_path
    assert not [pattern for pattern in asked["patterns"] if "safetensors" in pattern or "*" in pattern]

    def fail(model: str, allow_patterns: list[str]) -> str:
        raise OSError("offline")

    monkeypatch.setattr(module, "snapshot_download", fail)
    with pytest.raises(ConfigError, match="some/model"):
        resolve("some/model")


def test_added_token_flags_are_kept(tmp_path: Path) -> None:
    """Red if lstrip and friends of added_tokens_decoder are dropped."""
    added = {"4096": {"content": "<gap>", "special": True, "lstrip": True, "rstrip": True}}
    tokenizer = Tokenizer.load(folder_with(tmp_path, added_tokens_decoder=added))
    assert tokenizer.encode_inline("a <gap> b") == [*tokenizer.encode_inline("a"), 4096, *tokenizer.encode_inline("b")]
