"""A model folder's tokenizer: text to ids and back, as the model was trained with.

Owns reading tokenizer.json and tokenizer_config.json, the special ids, and the choice of what may block the event loop.
Runs no code from the model folder and builds no text incrementally: that is `detokenizer.py`.

Text is decoded as the tokenizers library does it; transformers' `clean_up_tokenization_spaces` (which removes spaces
that the model did write) is not applied.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from huggingface_hub import snapshot_download

from frontend.config import ConfigError
from frontend.detokenizer import Detokenizer, Detokenizers
from frontend.request import ApiError, Code

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")
"""What a frontend reads of a repository; no weights."""
MAX_CONFIG_BYTES = 32 << 20
INLINE_CHARS = 4096
"""Longer texts are encoded in a worker thread (about 1 ms at this length)."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def resolve(model: str) -> Path:
    """The folder of a model: itself, or a repository id's files as huggingface-hub has or fetches them.

    Raises ConfigError when there is neither.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(model, allow_patterns=list(FILES)))
    except Exception as error:  # the library raises many unrelated types
        raise ConfigError(
            f"--model {model!r} is neither a folder nor a repository that huggingface-hub could provide; "
            "give a folder with tokenizer.json, or check the name and the network"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json as a dictionary, empty where there is none. Raises ConfigError for anything else."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes; this is no tokenizer configuration")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return data


class Tokenizer:
    """Encodes and decodes; makes detokenizers. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        """`config` is tokenizer_config.json. Raises ConfigError where the two contradict each other."""
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        _add_missing_tokens(backend, config)
        self.special_ids = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        """One more than the highest id; the model's own vocabulary may be padded beyond it."""
        self.longest_token: int = max((len(token.encode()) for token in vocabulary), default=0)
        """No token stands for more bytes than this: the vocabulary writes each byte as one character or more."""
        self.named_tokens: dict[str, str] = {
            name: text for name in NAMED_TOKENS if (text := _content(config.get(name))) is not None
        }
        """bos_token, eos_token … as text, for chat templates."""
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        self.pad_id = self._named_id("pad_token")
        self._detokenizers = Detokenizers(backend, self.special_ids)
        self._texts: dict[int, str] = {}
        self._bos = self._bos_rule(config.get("add_bos_token"))

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read a model folder. Raises ConfigError naming the file and the remedy."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{path} is missing; --model needs a folder with tokenizer.json (a slow tokenizer is converted by "
                "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} is no tokenizer that the tokenizers library reads: {error}") from error
        return cls(backend, read_config(Path(folder)))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; long texts don't block the event loop.

        Raises ApiError (INVALID_ARGUMENT) for text that has no UTF-8 form.
        """
        if len(text) <= INLINE_CHARS:
            return self.encode_inline(text, add_special_tokens)
        return await asyncio.to_thread(self.encode_inline, text, add_special_tokens)

    def encode_inline(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`encode` on the calling thread."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                Code.INVALID_ARGUMENT,
                f"the text holds a lone surrogate at character {error.start}; send valid Unicode",
                "prompt",
            ) from None
        # The batch call releases the GIL, the single one doesn't.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if not add_special_tokens or self._bos is None or self.bos_id is None:
            return ids
        starts_with_bos = ids[:1] == [self.bos_id]
        if self._bos and not starts_with_bos:
            return [self.bos_id, *ids]
        return ids[1:] if starts_with_bos and not self._bos else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids, undecodable bytes as U+FFFD. Raises ApiError for an id outside 0 .. 2^32 - 1."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise ApiError(Code.INVALID_ARGUMENT, "token ids must be integers from 0 to 2^32 - 1", "tokens") from None

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence."""
        return self._detokenizers.new(skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The text of one id by itself, for people: special tokens as written, partial characters as U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            text = self.token_bytes(token).decode("utf-8", "replace")
            if 0 <= token < self.vocab_size:  # anything else would let callers grow the table
                self._texts[token] = text
        return text

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of one id by itself; empty for ids outside the vocabulary."""
        return self._detokenizers.token_bytes(token)

    def _named_id(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _bos_rule(self, wanted: object) -> bool | None:
        """True: a text starts with bos; False: it doesn't; None: as tokenizer.json's post-processor says."""
        return wanted if isinstance(wanted, bool) and self.bos_id is not None else None


def _content(token: object) -> str | None:
    """A token as tokenizer_config.json spells it: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add what `added_tokens_decoder` names beyond tokenizer.json. Raises ConfigError if an id would differ."""
    declared = config.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return
    for key, spec in sorted(declared.items(), key=lambda item: int(item[0]) if str(item[0]).isdecimal() else -1):
        text = _content(spec)
        if text is None or not str(key).isdecimal():
            raise ConfigError(f"tokenizer_config.json: added_tokens_decoder has a malformed entry {str(key)[:40]!r}")
        if backend.token_to_id(text) is None:
            options = {
                name: bool(spec[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in spec
            }
            token = tokenizers.AddedToken(text, special=bool(spec.get("special")), **options)
            backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
        if backend.token_to_id(text) != int(key):
            raise ConfigError(
                f"tokenizer_config.json gives {text!r} the id {key}, tokenizer.json {backend.token_to_id(text)}; "
                "the folder's files don't belong together"
            )
