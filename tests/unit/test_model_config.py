"""Model folders that lie or overflow: every one is a ConfigError that names the file and the field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine_core.errors import ConfigError
from engine_core.model_config import load_model_config

TINY = json.loads((Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen" / "config.json").read_text())


def folder(tmp_path: Path, **changes: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **changes}))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"hidden_size": 10**4000}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e308}}, "factor"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 1e-308}},
            "beta_fast",
        ),
        ({"rope_theta": 10**400, "rope_parameters": None}, "rope_theta"),
    ],
)
def test_numbers_beyond_any_model_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """Red if a number from a file reaches arithmetic or an allocation that overflows or never ends."""
    with pytest.raises(ConfigError, match=named):
        load_model_config(folder(tmp_path, **changes))


def test_deep_json_and_files_that_are_none(tmp_path: Path) -> None:
    """Red if nesting ends in a traceback, or opening a pipe hangs."""
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=r"config\.json can't be read"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="no regular file"):
        load_model_config(tmp_path)
