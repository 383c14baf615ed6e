"""Fixtures of the emulated kernels. Where there is no g++ these tests are not collected, and the header says so."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.emulated import EmulatedKernels

COMPILER = shutil.which("g++")
collect_ignore_glob = [] if COMPILER else ["test_*.py"]


def pytest_report_header() -> list[str]:
    return [] if COMPILER else ["CUDA kernels are not emulated: there is no g++ on this machine"]


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernels:
    return EmulatedKernels(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)
