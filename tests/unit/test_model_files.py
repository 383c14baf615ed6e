"""Why a model's files can't be had, in words of a person's own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from engine_core.errors import ConfigError
from engine_core.model_files import CONFIG_FILES, find_model
from frontend.config import ConfigError as FrontendConfigError
from frontend.tokenizer import resolve


def answered(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None)


FAILURES: list[tuple[Callable[[], Exception], str]] = [
    (lambda: LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known"), "can't be reached"),
    (lambda: RepositoryNotFoundError("404 Client Error.", response=answered(404)), "no such repository"),
    (lambda: GatedRepoError("403 Client Error.", response=answered(403)), "accept its terms"),
    (lambda: HfHubHTTPError("502 Server Error", response=answered(502)), "status 502"),
    (lambda: OSError(28, "No space left on device"), "No space left on device"),
    (lambda: HFValidationError("Repo id must be"), "its name"),
]


@pytest.mark.parametrize(("failure", "told"), FAILURES)
def test_a_repository_that_cant_be_had(
    monkeypatch: pytest.MonkeyPatch, failure: Callable[[], Exception], told: str
) -> None:
    """Red if the refusal speaks of Python's classes, or isn't one: a supervisor would start the process again."""

    def download(*_: object, **__: object) -> str:
        raise failure()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match=told) as refused:
        find_model("nobody/nothing", CONFIG_FILES)
    monkeypatch.setattr("frontend.tokenizer.snapshot_download", download)
    with pytest.raises(FrontendConfigError) as also:
        resolve("nobody/nothing")
    for message in (str(refused.value), str(also.value)):
        assert "--model" in message
        assert "Error" not in message
