"""Fail-stop on the card, in a real serving tree: whatever can't be proven ends the worker, and everybody hears of it.

A device-side assert in the prefill lane, a kernel that outlives its bound, a synchronization that fails: each strikes
the first worker of a tree in which rows decode and a prompt is on the prefill lane.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.harness import until
from tests.gpu.conftest import Measured
from tests.gpu.serving_tree import LONG_PROMPT, Stream, Tree

pytestmark = pytest.mark.gpu

BOUND_S = 3
HEARD_S = 2.0
"""From the abort to the last client's knowledge of it."""
NOTICED_S = 1.0
SPIN_MS = 30_000
DECODED = 14_000
"""Tokens: more than is decoded until the fault is found."""
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "assert": ({"kind": "assert"}, "\\(710\\)|device-side assert"),
    "spin": ({"kind": "hold", "milliseconds": SPIN_MS}, f"within {BOUND_S} s \\(--gpu-wait-timeout\\)"),
    "unprovable": ({"kind": "unprovable"}, "can't be synchronized after MemoryError: injected"),
}
MEMORY_SLACK = 512 << 20


@pytest.fixture
def gpu_memory(device: str) -> Any:
    """Bytes in use on the GPU, by whomever."""

    def used() -> int:
        if not device.startswith("cuda"):
            return 0
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) << 20

    return used


@pytest.fixture
def tree(
    request: pytest.FixtureRequest, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tree]:
    fault, _ = FAULTS[request.getfixturevalue("kind")]
    made = Tree(tmp_path, monkeypatch, device, fault, f"--gpu-wait-timeout={BOUND_S}")
    yield made
    made.stop()


@pytest.mark.parametrize("kind", FAULTS)
def test_o15_the_worker_aborts_and_everybody_hears_of_it(
    gpu_memory: Any, tree: Tree, kind: str, measured: Measured
) -> None:
    """E3, E6, O1, O14, O15: red when the worker lives on, a request never ends or hears of it late, the GPU's memory
    isn't given back, or `serve` doesn't serve again."""
    serving_bytes = gpu_memory()
    decoders = [Stream(tree, 16, DECODED).decoding() for _ in range(3)]
    struck = Stream(tree, LONG_PROMPT, 4)
    streams = [stream.ended() for stream in (*decoders, struck)]
    decided, noticed = tree.logged_at("abort_decided"), tree.logged_at("engine_failed")
    heard = max(stream.ended_at for stream in streams)
    until(tree.serves, "serving again")
    measured("abort_to_core_s", round(noticed - decided, 3))
    measured("abort_to_last_client_s", round(heard - decided, 3))
    measured("strike_to_abort_s", round(decided - tree.logged_at("fault_strikes"), 3))
    measured("abort_to_serving_again_s", round(time.time() - decided, 1))
    measured("gpu_bytes_while_serving", [serving_bytes, gpu_memory()])
    assert {stream.status for stream in streams} == {grpc.StatusCode.UNAVAILABLE}
    assert heard - decided < HEARD_S
    assert noticed - decided < NOTICED_S
    assert re.search(FAULTS[kind][1], tree.logged("engine_failed")["cause"])
    assert tree.said("engine core (ended|exited) with status 1"), "the engine core didn't end with status 1"
    assert gpu_memory() < serving_bytes + MEMORY_SLACK
