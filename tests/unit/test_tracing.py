"""Where spans go, at the end of a process."""

from __future__ import annotations

import threading

import pytest

from telemetry import tracing as module
from telemetry.tracing import Tracing

GUARD_S = 30.0


def test_a_silent_collector_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a process ends only once its collector has taken the last spans: a lost core would start again late."""
    gate, ended = threading.Event(), list[bool]()
    tracing = Tracing("http://127.0.0.1:9", "some")
    tracing.close()
    monkeypatch.setattr(module, "CLOSE_S", 0.01)
    monkeypatch.setattr(tracing._provider, "shutdown", lambda: ended.append(gate.wait(GUARD_S)))
    tracing.close()
    assert ended == []
    gate.set()
