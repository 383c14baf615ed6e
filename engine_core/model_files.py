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
        raise ConfigError(f"--model {model}: no such folder, and {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Why a repository can't be had, for people: the library's own texts speak of its classes."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "the repository must be asked for on the model hub: accept its terms, then `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "the model hub has no such repository, or shows it to others only: `hf auth login`"
    if isinstance(error, LocalEntryNotFoundError):
        return "the repository isn't in the local cache (HF_HOME) and the model hub can't be reached: name a folder"
    if isinstance(error, HfHubHTTPError):
        return f"the model hub answered with status {error.response.status_code}"
    if isinstance(error, OSError):
        return f"its files can't be kept: {error.strerror}"
    return "its name is none that the model hub has"
