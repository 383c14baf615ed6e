"""What waiting costs (tests/gpu/test_idle_wait.py): the worker with a prefill in flight, blocking and spinning events."""

from __future__ import annotations

from typing import Any

from scripts.gpu import tests_on_gpu
from scripts.gpu.options import Options


def run(options: Options) -> dict[str, Any]:
    return tests_on_gpu.run(options, "test_idle_wait.py")
