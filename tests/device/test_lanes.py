"""Completions and the guard on a scripted driver: rules E1 to E5, O1, O2, O4, O9, O13."""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.device.driver import EVENT_FLAGS, Driver, DriverError, Status
from engine_core.device.drop_queue import DropQueue
from engine_core.device.fail_stop import Unbounded
from engine_core.device.fake_driver import FakeTable
from engine_core.device.guard import LaunchGuard, Owned, Ownership, WorkFailed
from engine_core.device.lanes import EventSetupError, Lanes, LaneStream
from engine_core.step import Lane


class Aborted(BaseException):
    """Stands for the end of the process."""


class Script:
    """Faults by call name; streams run only when told."""

    def __init__(self) -> None:
        self.faults: dict[str, tuple[int, bool]] = {}
        self.run_on_query = False

    def fault(self, call: str) -> tuple[int, bool] | None:
        return self.faults.get(call)

    def progress(self, table: FakeTable) -> None:
        if self.run_on_query:
            table.run_all()


class Rig:
    """Two lanes, prefill on a Green Context's stream, over one scripted table."""

    def __init__(self) -> None:
        self.script = Script()
        self.table = FakeTable(self.script)
        _, primary = self.table.stream_create(0, 0)
        _, context = self.table.green_ctx_create("descriptor")
        _, prefill = self.table.green_ctx_stream_create(context, 0, 0)
        self.streams = {Lane.PRIMARY: primary, Lane.PREFILL: prefill}
        self.aborts: list[str] = []
        self.drops = DropQueue()
        self.lanes = Lanes(
            Driver(self.table, Unbounded()),
            {Lane.PRIMARY: LaneStream(primary), Lane.PREFILL: LaneStream(prefill, context)},
            self.abort,
        )
        self.guard = LaunchGuard(self.lanes, self.drops, self.abort, lambda error: False)

    def abort(self, what: str, error: BaseException | None = None) -> Any:
        self.aborts.append(f"{what}: {error}")
        raise Aborted

    def launch(self, lane: Lane, sequence: int) -> list[str]:
        """Enqueue one operation; the list it fills tells whether it has run."""
        ran: list[str] = []
        self.lanes.launching(lane, sequence)
        self.table.enqueue(self.streams[lane], lambda: ran.append("ran"))
        return ran


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_e1_event_flags() -> None:
    """E1: red when the flags lose BLOCKING_SYNC (a spinning wait) or DISABLE_TIMING."""
    assert EVENT_FLAGS == 0x1 | 0x2


def test_e2_green_streams_record_through_their_context(rig: Rig) -> None:
    """E2: red when `lanes.record` uses event_record for a Green Context's stream (the fake refuses, as CUDA may)."""
    rig.launch(Lane.PREFILL, 1)
    completion = rig.lanes.complete(Lane.PREFILL, 1)
    assert not rig.lanes.done(completion)
    rig.table.run_all()
    assert rig.lanes.done(completion)
    assert "green_ctx_record_event" in rig.table.calls
    assert "event_record" not in rig.table.calls


def test_e3_not_ready_is_pending_and_any_other_answer_aborts(rig: Rig) -> None:
    """E3: red when `done` takes an error for "not ready" or for "complete"."""
    rig.launch(Lane.PRIMARY, 1)
    completion = rig.lanes.complete(Lane.PRIMARY, 1)
    assert rig.lanes.done(completion) is False
    for status in (Status.ILLEGAL_ADDRESS, Status.INVALID_HANDLE, Status.LAUNCH_FAILED):
        rig.script.faults["event_query"] = (status, False)
        with pytest.raises(Aborted):
            rig.lanes.done(completion)
    assert rig.lanes.proven(Lane.PRIMARY) == 0


def test_e4_record_failure_keeps_the_destroy_failure_beside_it(rig: Rig) -> None:
    """E4: red when the clean-up's status is dropped."""
    rig.launch(Lane.PRIMARY, 1)
    rig.script.faults = {
        "event_record": (Status.INVALID_HANDLE, False),
        "event_destroy": (Status.INVALID_VALUE, False),
    }
    with pytest.raises(
        EventSetupError, match=r"event_record returned INVALID_HANDLE.*event_destroy returned INVALID_V"
    ):
        rig.lanes.complete(Lane.PRIMARY, 1)


def test_e4_destroy_failure_after_proof_is_only_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """E4: red when a leaked event ends the worker, or leaks in silence."""
    rig.launch(Lane.PRIMARY, 1)
    completion = rig.lanes.complete(Lane.PRIMARY, 1)
    rig.table.run_all()
    assert rig.lanes.done(completion)
    rig.script.faults["event_destroy"] = (Status.INVALID_HANDLE, False)
    rig.lanes.discard(completion)
    assert "a completion event leaks" in caplog.text
    assert rig.aborts == []


def test_e5_event_setup_failure_synchronizes_before_it_is_reported(rig: Rig) -> None:
    """E5: red when the guard raises without having run the launched work to its end."""
    owned = Owned("step 1")
    owned.to(Ownership.LAUNCHING)
    ran = rig.launch(Lane.PRIMARY, 1)
    rig.script.faults["event_create"] = (Status.OUT_OF_MEMORY, False)
    with pytest.raises(WorkFailed, match="event_create returned OUT_OF_MEMORY"), rig.guard.armed(owned):
        rig.lanes.complete(Lane.PRIMARY, 1)
    assert ran == ["ran"]
    assert owned.state is Ownership.FAILED


def test_o1_an_error_synchronizes_every_lane_with_launched_work(rig: Rig) -> None:
    """O1, O4: red when only the failing lane is synchronized; the prefill must be done before the error is out."""
    prefill, decode = rig.launch(Lane.PREFILL, 3), rig.launch(Lane.PRIMARY, 4)
    owned = Owned("step 4")
    owned.to(Ownership.LAUNCHING)
    with pytest.raises(WorkFailed, match="step 4 failed: MemoryError: no room"), rig.guard.armed(owned):
        raise MemoryError("no room")
    assert (prefill, decode) == (["ran"], ["ran"])
    assert (rig.lanes.proven(Lane.PREFILL), rig.lanes.proven(Lane.PRIMARY)) == (3, 4)


def test_o1_o9_unprovable_synchronization_aborts_with_both_errors(rig: Rig) -> None:
    """O1, O9: red when a failed synchronization is swallowed or replaces the first error."""
    rig.launch(Lane.PREFILL, 3)
    rig.drops.defer("buffer", Lane.PREFILL, 3)
    rig.script.faults["stream_synchronize"] = (Status.LAUNCH_FAILED, False)
    with pytest.raises(Aborted), rig.guard.armed():
        raise ValueError("first")
    assert "ValueError: first" in rig.aborts[0]
    assert "stream_synchronize returned LAUNCH_FAILED" in rig.aborts[0]
    assert len(rig.drops) == 1


def test_o9_every_lane_that_can_t_be_synchronized_is_named(rig: Rig) -> None:
    """O9: red when the second lane's failure is dropped because there was a first."""
    rig.launch(Lane.PREFILL, 3)
    rig.launch(Lane.PRIMARY, 4)
    rig.script.faults["stream_synchronize"] = (Status.LAUNCH_FAILED, False)
    with pytest.raises(Aborted):
        rig.guard.quiesce("teardown")
    assert "lane PRIMARY: stream_synchronize returned LAUNCH_FAILED" in rig.aborts[0]
    assert "lane PREFILL: stream_synchronize returned LAUNCH_FAILED" in rig.aborts[0]


def test_o2_deferred_memory_is_released_only_after_synchronization(rig: Rig) -> None:
    """O2, O3: red when the drop queue is emptied before the lanes are proven idle."""
    ran = rig.launch(Lane.PREFILL, 1)
    order: list[str] = []

    class Buffer:
        def __del__(self) -> None:
            order.append(f"freed after {ran}")

    rig.drops.defer(Buffer(), Lane.PREFILL, 1)
    with pytest.raises(WorkFailed), rig.guard.armed():
        raise RuntimeError("forward")
    assert order == ["freed after ['ran']"]


def test_o2_frames_of_a_failed_forward_live_until_the_lanes_are_idle(rig: Rig) -> None:
    """O2: red when the traceback's frames are cleared before the synchronization, or never."""
    ran = rig.launch(Lane.PREFILL, 1)
    order: list[str] = []

    class Temporary:
        def __del__(self) -> None:
            order.append(f"freed after {ran}")

    def forward() -> None:
        held = Temporary()
        raise RuntimeError(f"forward with {type(held).__name__}")

    with pytest.raises(WorkFailed) as caught, rig.guard.armed():
        forward()
    assert caught.value.__context__ is None or order == ["freed after ['ran']"]
    assert order == ["freed after ['ran']"]


def test_o14_driver_errors_inside_guarded_work_abort(rig: Rig) -> None:
    """O14: red when a CUDA error that escapes a call is treated as recoverable."""
    with pytest.raises(Aborted), rig.guard.armed(Owned("step 1")):
        raise DriverError("stream_wait_event", Status.ILLEGAL_ADDRESS)


def test_o13_teardown_synchronizes_or_aborts(rig: Rig) -> None:
    """O13: red when `quiesce` returns with launched work unproven."""
    ran = rig.launch(Lane.PREFILL, 1)
    rig.guard.quiesce("teardown")
    assert ran == ["ran"]
    rig.launch(Lane.PREFILL, 2)
    rig.script.faults["stream_synchronize"] = (Status.UNKNOWN, False)
    with pytest.raises(Aborted):
        rig.guard.quiesce("teardown")


def test_illegal_ownership_transitions_raise() -> None:
    """Red when work can be replied to before its completion, or owned before it was launched."""
    owned = Owned("step 1")
    with pytest.raises(AssertionError):
        owned.to(Ownership.WORKER_OWNED)
    owned.to(Ownership.LAUNCHING)
    owned.to(Ownership.LAUNCHED)
    owned.to(Ownership.WORKER_OWNED)
    with pytest.raises(AssertionError):
        owned.to(Ownership.REPLIED)


def test_drop_queue_releases_by_lane_in_order() -> None:
    """O3: red when a lane's proof releases another lane's memory or a later sequence."""
    drops = DropQueue()
    drops.defer("a", Lane.PRIMARY, 1)
    drops.defer("b", Lane.PRIMARY, 3)
    drops.defer("c", Lane.PREFILL, 1)
    assert drops.release(Lane.PRIMARY, 2) == 1
    assert len(drops) == 2
    with pytest.raises(ValueError):
        drops.defer("d", Lane.PRIMARY, 2)


def test_a_lane_changes_its_stream_only_once_it_is_proven_idle() -> None:
    """L2, E2: red when a completion recorded on the new stream could stand for work on the old one."""
    rig = Rig()
    _, other = rig.table.stream_create(0, 0)
    target = LaneStream(other)
    rig.launch(Lane.PREFILL, 1)
    with pytest.raises(RuntimeError, match="lane PREFILL can't change its stream"):
        rig.lanes.steer(Lane.PREFILL, target)
    rig.table.run_all()
    rig.lanes.synchronize()
    rig.lanes.steer(Lane.PREFILL, target)
    rig.lanes.launching(Lane.PREFILL, 2)
    assert rig.lanes.complete(Lane.PREFILL, 2).event.stream is other
