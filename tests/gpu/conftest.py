"""What the GPU tests share: the device they run on, the kernels of probe.cu, and a torch that is ready.

`--gpu-device fake` rehearses those that need no real kernel. Nothing here imports CUDA before a test asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.probes import Probes

Measured = Callable[[str, Any], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-device", default="cuda", help="device of the servers under test")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--gpu-device", default="cuda"))


@pytest.fixture(scope="session")
def cuda() -> Any:
    """torch.cuda with a current context."""
    import torch

    torch.zeros(1, device="cuda")
    return torch.cuda


@pytest.fixture(scope="session")
def probes(cuda: Any, tmp_path_factory: pytest.TempPathFactory) -> Probes:
    return Probes(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    """Passes a figure on to whoever runs these tests."""

    def record(name: str, value: Any) -> None:
        record_property(name, json.dumps(value))

    return record
