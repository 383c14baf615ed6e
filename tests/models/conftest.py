"""One torch thread (the models are tiny), and checkpoints that tests may damage: built once, copied for each test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models.checkpoints import Recipe, build


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one untied Qwen3 in a single file and one tied Llama in shards."""
    root = tmp_path_factory.mktemp("checkpoints")
    build(Recipe("qwen3"), root / "single")
    build(Recipe("llama", {"tie_word_embeddings": True}, shard_size="200KB"), root / "sharded")
    return root


@pytest.fixture
def single(built: Path, tmp_path: Path) -> Path:
    """A copy of the Qwen3 in a single file."""
    return Path(shutil.copytree(built / "single", tmp_path / "single"))


@pytest.fixture
def sharded(built: Path, tmp_path: Path) -> Path:
    """A copy of the Llama in shards."""
    return Path(shutil.copytree(built / "sharded", tmp_path / "sharded"))
