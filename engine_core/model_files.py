"""Where a model's files are: a folder as given, or a repository id looked up through huggingface-hub.

Owns which files of a repository are fetched (weights as safetensors only; never code). Reads none of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from engine_core.errors import ConfigError

CONFIG_FILES = ("config.json", "generation_config.json")
SERVED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "vocab*", "merges.txt")
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(model: str, patterns: Sequence[str]) -> Path:
    """The folder of a model; a repository's files that match `patterns` are fetched where they aren't cached yet.

    Raises ConfigError for what is neither a folder nor a repository that can be had.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if not REPOSITORY.fullmatch(model):
        raise ConfigError(f"--model {model}: no such folder, and no repository id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"--model {model}: no such folder, and the repository can't be had: {reason}") from error
