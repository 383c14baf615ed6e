"""A shorter run of the load test of scripts/bench/soak.py; what it checks is written there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from scripts.bench.soak import broken
from tests.e2e.harness import ROOT

pytestmark = pytest.mark.e2e


def test_load_with_cancellations() -> None:
    """Red if a request is lost or counted twice, a page stays referenced, or a process keeps what it took.

    Memory is left to the full run: a process is still warming up in the first hundreds of requests.
    """
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "soak.py"), "--requests=400", "--clients=32"]
    result = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["left"] > 40
    assert [what for what in broken(found) if what != "a process grew"] == [], result.stdout


def test_soak_sees_what_is_wrong() -> None:
    """Red if a broken account passes."""
    nothing = ("failed", "errors", "rejected", "pages_referenced", "pages_missing")
    good: dict[str, Any] = dict.fromkeys(nothing, 0) | {"accepted": 5, "finished": 3, "aborted": 2, "prefix_hits": 1}
    good |= {"memory_growth": {"worker": 1.0}, "descriptor_growth": {"worker": 0}}
    assert broken(good) == []
    for name in (*nothing, "accepted"):
        assert len(broken({**good, name: good[name] + 1})) == 1
    assert broken({**good, "memory_growth": {"worker": 1.03}}) == ["a process grew"]
    assert broken({**good, "descriptor_growth": {"worker": 9}}) == ["descriptors leak"]
