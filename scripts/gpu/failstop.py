"""Fail-stop in a real serving tree (tests/gpu/test_fail_stop.py): a device-side assert, a kernel past its bound, a
synchronization that fails."""

from __future__ import annotations

from typing import Any

from scripts.gpu import tests_on_gpu
from scripts.gpu.options import Options


def run(options: Options) -> dict[str, Any]:
    return tests_on_gpu.run(options, "test_fail_stop.py")
