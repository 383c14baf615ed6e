"""How worker processes are spawned: the environment that they find."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from engine_core.executor.processes import WorkerProcess

PRINT_ENVIRONMENT = """
import os, sys
os.write(int(sys.argv[1]), ",".join(os.environ.get(n, "-") for n in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")).encode())
"""


def _printer(address: str, control_fd: int) -> Sequence[str]:
    return [sys.executable, "-c", PRINT_ENVIRONMENT, str(control_fd)]


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({}, "passive,10000"),
        ({"OMP_WAIT_POLICY": "active"}, "active,-"),
        ({"GOMP_SPINCOUNT": "5"}, "-,5"),
    ],
)
def test_idle_threads_spin_briefly_unless_somebody_chose(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], found: str
) -> None:
    """Red when a worker's threads sleep at once or spin for long, or when half of an operator's choice is replaced."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    process = WorkerProcess.spawn(_printer, "")
    try:
        assert process.wait(10) == 0
        assert process.farewell() == found
    finally:
        process.close()
