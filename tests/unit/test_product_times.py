"""What is measured of two lanes side by side, over a torch.cuda that runs everything at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from engine_core.device.cuda import product_times
from engine_core.device.cuda.product_times import ProductTimes


class Event:
    """Numbered by their records; a ms lies between two."""

    def __init__(self, number: int) -> None:
        self.number = number

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return float(other.number - self.number)


class Stream:
    """Of a device that is never busy for longer than `looks` looks."""

    def __init__(self, looks: int = 0) -> None:
        self._looks = looks
        self._records = 0

    def synchronize(self) -> None:
        """Everything has run."""

    def query(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def record_event(self, event: object) -> Event:
        self._records += 1
        return Event(self._records)


@pytest.mark.parametrize(("looks", "decoded"), [(0, 3), (1, 4), (6, 9)])
def test_lanes_side_by_side_on_a_host_that_stands_still(
    looks: int, decoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a prefill that is done at the first look leaves nothing to measure decode by: the start failed then."""
    fake = SimpleNamespace(graph_pool_handle=lambda: 1, stream=lambda stream: nullcontext(), Event=lambda **_: None)
    monkeypatch.setattr(product_times, "_cuda", fake)
    monkeypatch.setattr("engine_core.device.cuda.graphs._cuda", fake)
    monkeypatch.setattr(product_times, "BESIDE_S", 0.0)
    primary: Any = Stream()
    lane: Any = Stream(looks)
    replays: list[str] = []

    def note(what: str) -> Callable[[], None]:
        return lambda: replays.append(what)

    prefill_s, decode_s = ProductTimes(primary).side_by_side(lane, note("prefill"), note("decode"))
    assert prefill_s > 0.0
    assert decode_s == pytest.approx(1e-3)
    assert replays.count("decode") == decoded
