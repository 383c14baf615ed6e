"""Real workers on a simulated driver that hangs or fails: how they end, and what the core hears (E6, O7, O13, O15)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from engine_core.device.fail_stop import EXIT_ABORT
from engine_core.errors import EngineDead, describe_chain
from engine_core.executor.zmq import ZmqExecutor
from engine_core.step import PrefillChunk, StepPlan, StepResult
from tests.device.rig import plan, row
from tests.worker_config import worker_config

pytestmark = pytest.mark.e2e
SCRIPT = Path(__file__).with_name("faulty_worker.py")
MODEL = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen"
GUARD_S = 60.0
"""Only a hang takes this long."""
BOUND_S = 1.0

CONFIG = worker_config(decode_overlap="green", gpu_wait_timeout=GUARD_S)


class Rig:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._executor: ZmqExecutor | None = None
        self.log = folder / "calls"

    def arguments(self, fault: str, pace: str) -> list[str]:
        return [sys.executable, "-P", str(SCRIPT), fault, pace, str(self.log)]

    def open(self, fault: str = "none", pace: str = "eager", *, by_hand: bool = False) -> ZmqExecutor:
        def command(address: str, control_fd: int) -> Sequence[str]:
            return [*self.arguments(fault, pace), "--connect", address, "--control-fd", str(control_fd)]

        self._executor = ZmqExecutor(
            self._folder / "worker.sock",
            command=None if by_hand else command,
            wake_fd=self._wake_fd,
            gpu_wait_timeout=GUARD_S,
            worker_timeout=GUARD_S,
            start_timeout=GUARD_S,
        )
        return self._executor

    def calls(self) -> list[str]:
        return self.log.read_text().split()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.kill()
        os.close(self._wake_fd)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    tmp_path.chmod(0o700)
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def start(executor: ZmqExecutor, *, wait_timeout: float = GUARD_S) -> None:
    executor.start(msgspec.structs.replace(CONFIG, gpu_wait_timeout=wait_timeout), lambda loading: None)


def prompt(step: int) -> StepPlan:
    return plan(step, starts=[row(0, [1, 2], [0, 1])], chunks=[PrefillChunk(0, 0, 2, True)])


def results(executor: ZmqExecutor, count: int) -> list[StepResult]:
    got: list[StepResult] = []
    guard = time.monotonic() + GUARD_S
    while len(got) < count:
        assert time.monotonic() < guard
        executor.wait(1.0)
        got += executor.collect()
    return got


def death(executor: ZmqExecutor) -> str:
    with pytest.raises(EngineDead) as caught:
        results(executor, 1)
    return describe_chain(caught.value)


def test_plans_are_served_and_the_worker_leaves_with_idle_lanes(rig: Rig) -> None:
    """O13: red when the worker frees before it has synchronized, or its exit isn't clean."""
    executor = rig.open()
    start(executor)
    executor.submit(prompt(1))
    executor.submit(plan(2, decode=[0]))
    assert [result.step for result in results(executor, 2)] == [1, 2]
    executor.close()
    assert rig.calls()[-1] == "free"


@pytest.mark.parametrize(
    ("fault", "pace", "cause"),
    [
        ("event_record:1:hang", "eager", f"step 1 did not end within {BOUND_S:g} s (--gpu-wait-timeout)"),
        ("event_query:1:hang", "eager", f"collecting results did not end within {BOUND_S:g} s (--gpu-wait-timeout)"),
        ("none", "pending", f"step 1 was not complete on lane PRIMARY within {BOUND_S:g} s (--gpu-wait-timeout)"),
        ("event_query:1:fail", "pending", "event_query returned LAUNCH_FAILED (719)"),
    ],
)
def test_e6_o15_a_call_that_hangs_or_fails_ends_the_worker_with_its_cause(
    rig: Rig, fault: str, pace: str, cause: str
) -> None:
    """E3, E6, O15: red when the core learns of the end without its cause, or memory is freed on the way."""
    executor = rig.open(fault, pace)
    start(executor, wait_timeout=GUARD_S if fault.endswith("fail") else BOUND_S)
    executor.submit(prompt(1))
    assert cause in death(executor)
    assert "free" not in rig.calls()


def test_o7_a_quiesce_that_hangs_ends_the_worker(rig: Rig) -> None:
    """O7, E6: red when a lane that can't be synchronized keeps the core waiting."""
    executor = rig.open("stream_synchronize:1:hang", "pending")
    start(executor, wait_timeout=BOUND_S)
    executor.submit(prompt(1))
    executor.quiesce()
    assert f"did not end within {BOUND_S:g} s" in death(executor)
    assert not executor.quiesced


@pytest.mark.parametrize(
    ("fault", "status", "freed"),
    [("none", 1, True), ("stream_synchronize:1:fail", EXIT_ABORT, False)],
)
def test_o7_a_worker_that_loses_its_core_synchronizes_or_aborts(rig: Rig, fault: str, status: int, freed: bool) -> None:
    """O7, O13: red when a lost core ends the process by way of destructors, under running work."""
    executor = rig.open(by_hand=True)
    address = f"ipc://{rig.log.parent / 'worker.sock'}"
    worker = subprocess.Popen([*rig.arguments(fault, "pending"), "--connect", address], stderr=subprocess.DEVNULL)
    try:
        start(executor)
        executor.submit(prompt(1))
        guard = time.monotonic() + GUARD_S
        while "event_record" not in rig.calls():
            assert time.monotonic() < guard
        executor.kill()
        assert worker.wait(GUARD_S) == status
    finally:
        worker.kill()
        worker.wait(GUARD_S)
    calls = rig.calls()
    assert "stream_synchronize" in calls
    assert (calls[-1] == "free") is freed
