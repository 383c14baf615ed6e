"""What a gateway that tokenizes by itself needs of the model folder: where it is, and its tokenizer as an archive.

Owns the archive's contents. The same files give the same bytes on every machine, so that a fingerprint tells models
apart. Everything is read once, at the start: a folder that changes later changes nothing here.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from frontend.config import ConfigError
from frontend.tokenizer import FILES

ARCHIVED = (*FILES, "special_tokens_map.json", "added_tokens.json")
MAX_FILE_BYTES = 256 << 20
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every file in the archive."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model folder as it was at the start."""

    folder: Path
    model_type: str
    """From config.json; empty where that isn't there."""
    archive: bytes
    """Zip of the tokenizer's files."""
    sha256: str
    """Of the archive, in hexadecimal digits."""

    @classmethod
    def load(cls, folder: Path) -> ModelFiles:
        """Raises ConfigError for files that can't be read."""
        try:
            archive = _zip([folder / name for name in ARCHIVED if (folder / name).is_file()])
            model_type = _model_type(folder / "config.json")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"the tokenizer files of {folder} can't be read: {error}") from error
        return cls(folder.resolve(), model_type, archive, hashlib.sha256(archive).hexdigest())


def _zip(paths: list[Path]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in paths:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"{path.name} is larger than {MAX_FILE_BYTES} bytes")
            entry = zipfile.ZipInfo(path.name, EPOCH)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _model_type(path: Path) -> str:
    if not path.is_file():
        return ""
    data = json.loads(path.read_text(encoding="utf-8"))
    return str(data.get("model_type", "")) if isinstance(data, dict) else ""
