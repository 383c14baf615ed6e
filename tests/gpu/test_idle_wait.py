"""What waiting costs on the card: rules E1, E6 and E7."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_core.device.driver import EVENT_FLAGS, STREAM_NON_BLOCKING, Driver
from engine_core.device.fail_stop import Unbounded
from scripts.serving import cpu_seconds
from tests.e2e.harness import until
from tests.gpu.conftest import Measured
from tests.gpu.probes import Probes
from tests.gpu.serving_tree import LONG_PROMPT, Stream, Tree

pytestmark = pytest.mark.gpu

HOLD_MS = 10_000
WATCHED_S = 6.0
LEAST_IDLE = 0.01
"""Share of a core that a waiting worker may use."""
SPINNING_FLAGS = 0x2
EVENT_HOLD_MS = 1000


@pytest.fixture
def tree(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    made = Tree(tmp_path, monkeypatch, device, {"kind": "hold", "milliseconds": HOLD_MS}, "--gpu-wait-timeout=60")
    yield made
    made.stop()


def test_e7_idle_with_a_prefill_in_flight_uses_no_cpu(tree: Tree, measured: Measured) -> None:
    """E6, E7: red when the worker polls while all that's left is a prefill in flight, or when its result needs another
    request to come out."""
    decoder = Stream(tree, 16, 1500).decoding()
    held = Stream(tree, LONG_PROMPT, 4)
    until(lambda: tree.said('"event": "fault_strikes"'), "the prefill is on its lane")
    decoder.ended()
    time.sleep(0.5)
    used = {role: -cpu_seconds(pid) for pid, role in tree.serving.roles().items()}
    began = time.monotonic()
    time.sleep(WATCHED_S)
    seconds = time.monotonic() - began
    for pid, role in tree.serving.roles().items():
        used[role] = round((used[role] + cpu_seconds(pid)) / seconds, 5)
    assert not held.begun.is_set(), "the prefill was over before the end of the measurement"
    measured("core_share_by_role", used)
    held.ended()
    assert held.begun.is_set()
    assert max(share for role, share in used.items() if role.startswith("worker")) < LEAST_IDLE


@pytest.mark.parametrize(("kind", "flags"), [("blocking", EVENT_FLAGS), ("spinning", SPINNING_FLAGS)])
def test_e1_what_a_wait_costs(cuda: Any, probes: Probes, measured: Measured, kind: str, flags: int) -> None:
    """E1: red when a wait for an event of the product's flags spins; what one without BLOCKING_SYNC costs stands
    beside it."""
    from engine_core.device.cuda.driver import CudaTable

    driver = Driver(CudaTable(0), Unbounded())
    stream, event = driver.call("stream_create", STREAM_NON_BLOCKING, 0), driver.call("event_create", flags)
    with cuda.stream(cuda.ExternalStream(int(stream))):
        probes.hold(EVENT_HOLD_MS)
    driver.call("event_record", event, stream)
    wall, cpu = time.perf_counter(), time.process_time()
    driver.event_wait(event)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    driver.call("event_destroy", event)
    driver.call("stream_destroy", stream)
    measured("wall_s", round(wall, 4))
    measured("cpu_s", round(cpu, 4))
    assert wall > 0.8 * EVENT_HOLD_MS / 1e3
    assert kind == "spinning" or cpu < 0.05 * wall
