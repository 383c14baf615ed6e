"""Bounded waits without polling: the watchdog, the completion thread and the worker's own bound (rules E6, E7)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine_core.device.completion import CompletionThread
from engine_core.device.driver import Driver, Status
from engine_core.device.fail_stop import Unbounded, Watchdog
from engine_core.device.fake_driver import FakeTable
from engine_core.device.lanes import Completion, Lanes, LaneStream
from engine_core.executor.channel import FrameChannel
from engine_core.step import Lane, PrefillChunk
from engine_core.worker.worker import Worker
from tests.device.rig import Aborted, RunnerRig, Script, plan, row

GUARD_S = 60.0
"""Only a hang takes this long."""


class NoFrames:
    def send(self, data: bytes) -> None:
        raise AssertionError("nothing is to be sent")

    def receive(self) -> bytes | None:
        return None


class BlockingTable(FakeTable):
    """event_synchronize blocks until the test lets it go."""

    def __init__(self) -> None:
        super().__init__(Script(eager=False))
        self.entered, self.go = threading.Event(), threading.Event()

    def event_synchronize(self, event: Any) -> tuple[int]:
        self.entered.set()
        assert self.go.wait(GUARD_S)
        return (Status.SUCCESS,)


def test_e6_the_watchdog_ends_a_section_that_outlives_its_bound() -> None:
    """E6: red when a call that hangs is never noticed, or the cause doesn't name it."""
    expired = threading.Event()
    causes: list[str] = []

    def end(cause: str) -> None:
        causes.append(cause)
        expired.set()

    watchdog = Watchdog(0.01, end)
    with watchdog.bounded("step 7"), watchdog.bounded("event_record"):
        assert expired.wait(GUARD_S)
    watchdog.close()
    assert causes == ["step 7 did not end within 0.01 s (--gpu-wait-timeout)"]


def test_e6_sections_that_end_in_time_expire_nothing() -> None:
    """E6: red when a section's deadline outlives the section."""
    causes: list[str] = []
    idle = threading.Event()
    watchdog = Watchdog(0.02, causes.append)
    with watchdog.bounded("step 1"):
        pass
    idle.wait(0.1)
    watchdog.close()
    assert causes == []


def test_e6_the_completion_thread_blocks_in_the_driver_and_wakes_the_loop_once() -> None:
    """E6: red when the loop is woken before the completion, or never, or the event is destroyed under the waiter."""
    table = BlockingTable()
    _, stream = table.stream_create(0, 0)
    lanes = Lanes(Driver(table, Unbounded()), {Lane.PRIMARY: LaneStream(stream)}, abort_test)
    lanes.launching(Lane.PRIMARY, 1)
    completion = lanes.complete(Lane.PRIMARY, 1)
    woken = threading.Semaphore(0)
    thread = CompletionThread(table, woken.release)
    thread.watch(completion)
    thread.watch(completion)
    assert table.entered.wait(GUARD_S)
    assert not woken.acquire(blocking=False)
    lanes.discard(completion)
    assert table.live_events == 1
    table.go.set()
    assert woken.acquire(timeout=GUARD_S)
    thread.close()
    assert not woken.acquire(blocking=False)
    later = lanes.complete(Lane.PRIMARY, 1)
    lanes.discard(later)
    assert table.live_events == 0


def abort_test(what: str, error: BaseException | None = None) -> None:
    raise Aborted(what)


def test_e6_a_prefill_that_hangs_is_found_while_decode_goes_on() -> None:
    """E6: red when only the oldest step's completion has a bound: decode comes back on time, the prefill never."""
    rig = RunnerRig(Script(eager=False))
    worker = Worker(FrameChannel(NoFrames()), rig.runner, Unbounded(), rig.abort, wait_timeout=10.0)
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0, 1, 2])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.table.run_all()
    rig.runner.collect()
    chunk = PrefillChunk(1, 0, 3, True)
    rig.runner.launch(plan(2, starts=[row(1, [1, 2, 3], [4])], decode=[0], chunks=[chunk], lane=True))
    for step in range(3, 9):
        assert worker.awaited(float(step)) != (None, None)
        rig.table.run(rig.streams[Lane.PRIMARY], 99)
        rig.runner.collect()
        rig.runner.launch(plan(step, decode=[0]))
    with pytest.raises(Aborted, match=r"step 2 was not complete on lane PREFILL within 10 s"):
        worker.awaited(13.0)


def test_e6_each_step_has_the_whole_bound() -> None:
    """E6: red when a step's time counts from the one before it, or starts anew at each look."""
    rig = RunnerRig(Script(eager=False))
    worker = Worker(FrameChannel(NoFrames()), rig.runner, Unbounded(), rig.abort, wait_timeout=10.0)
    assert worker.awaited(0.0) == (None, None)
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0, 1])], chunks=[PrefillChunk(0, 0, 2, True)]))
    first = left(worker, 100.0)
    assert (first, left(worker, 109.0)) == (10.0, 1.0)
    rig.table.run_all()
    rig.runner.collect()
    rig.runner.launch(plan(2, decode=[0]))
    assert left(worker, 110.0) == 10.0
    with pytest.raises(Aborted, match="step 2 was not complete"):
        worker.awaited(120.0)


def left(worker: Worker, now: float) -> float:
    completion, seconds = worker.awaited(now)
    assert isinstance(completion, Completion)
    assert seconds is not None
    return seconds


def test_e7_the_loop_s_top_only_queries() -> None:
    """E7: red when collecting results blocks, or asks for anything but the state of events."""
    rig = RunnerRig(Script(eager=False))
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0])], chunks=[PrefillChunk(0, 0, 2, True)]))
    before = len(rig.table.calls)
    assert rig.runner.collect() == []
    assert rig.table.calls[before:] == ["event_query"]
    rig.table.run_all()
    assert len(rig.runner.collect()) == 1
    assert rig.table.calls[before + 1 :] == ["event_query", "event_destroy"]
