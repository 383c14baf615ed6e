"""Failures at the hand-over of launched work, on the card, in the real runner: tests/gpu/test_hand_off.py."""

from __future__ import annotations

from typing import Any

from scripts.gpu import tests_on_gpu
from scripts.gpu.options import Options


def run(options: Options) -> dict[str, Any]:
    return tests_on_gpu.run(options, "test_hand_off.py")
