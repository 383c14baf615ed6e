"""The worker between its frames and its runner: broken frames, lost replies, quiescence, the end (O6, O7, O13, O15)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
import pytest

from engine_core.device.base import Batch, Int32
from engine_core.device.driver import Status
from engine_core.device.fail_stop import FailStop, Unbounded
from engine_core.errors import ProtocolViolation
from engine_core.executor.channel import (
    Body,
    CaughtUp,
    Farewell,
    Frame,
    FrameChannel,
    Hello,
    Plan,
    Quiesce,
    Quiesced,
    Result,
    Shutdown,
)
from engine_core.step import WIRE_VERSION, Lane, PrefillChunk, RowStart
from engine_core.worker.unconstrained import UNCONSTRAINED, Constraints, Unconstrained
from engine_core.worker.worker import Worker
from tests.device.rig import Aborted, RunnerRig, Script, plan, row

IDS = [5, 6, 7, 8, 9, 10]


class Wire:
    """The worker's socket; `full` refuses what it sends."""

    def __init__(self) -> None:
        self.arriving: deque[bytes] = deque()
        self.sent: list[bytes] = []
        self.full = False
        self.on_send: Callable[[Body], None] = lambda body: None

    def send(self, data: bytes) -> None:
        if self.full:
            raise ProtocolViolation("the peer doesn't read")
        self.on_send(msgspec.msgpack.decode(data, type=Frame).body)
        self.sent.append(data)

    def receive(self) -> bytes | None:
        return self.arriving.popleft() if self.arriving else None


class WorkerRig(RunnerRig):
    """A worker with both lanes, and a real FailStop whose end is an exception."""

    def __init__(self, constraints: Constraints = UNCONSTRAINED) -> None:
        super().__init__(Script(eager=False), constraints=constraints)
        self.wire = Wire()
        self.channel = FrameChannel(self.wire)
        self.fail_stop = FailStop(
            farewell=lambda cause: self.channel.send(Farewell(cause)), control_fd=None, crash_dir=None, end=self.end
        )
        self.worker = Worker(self.channel, self.runner, Unbounded(), self.abort, wait_timeout=10.0)
        self._numbered = 0

    def abort(self, what: str, error: BaseException | None = None) -> None:
        self.fail_stop.abort(what, error)

    def end(self, status: int) -> None:
        self.aborts.append(f"exit {status}")
        raise Aborted(status)

    def deliver(self, body: Body, *, sequence: int | None = None, version: int = WIRE_VERSION) -> None:
        self._numbered += 1
        frame = Frame(version, self._numbered if sequence is None else sequence, body)
        self.wire.arriving.append(msgspec.msgpack.encode(frame))

    def said(self) -> list[Body]:
        return [msgspec.msgpack.decode(data, type=Frame).body for data in self.wire.sent]

    def decode_and_prefill_in_flight(self) -> None:
        self.deliver(Plan(plan(1, starts=[row(0, [1, 2], [0])], chunks=[PrefillChunk(0, 0, 2, True)])))
        self.worker.step()
        self.table.run_all()
        chunk = PrefillChunk(1, 0, 6, True)
        self.deliver(Plan(plan(2, starts=[row(1, IDS, [1, 2])], decode=[0], chunks=[chunk], lane=True)))
        self.worker.step()

    @property
    def idle(self) -> bool:
        return not any(stream.queue for stream in self.streams.values())


@pytest.fixture
def rig() -> WorkerRig:
    return WorkerRig()


BREAKAGES: dict[str, tuple[Callable[[WorkerRig], None], str]] = {
    "garbage": (lambda rig: rig.wire.arriving.append(b"\x93\x01\x04"), "a malformed frame of 3 bytes"),
    "gap": (lambda rig: rig.deliver(Quiesce(1), sequence=9), "frame 9 arrived after frame 2 (gap)"),
    "duplicate": (lambda rig: rig.deliver(Quiesce(1), sequence=2), "frame 2 arrived after frame 2 (duplicate)"),
    "version": (lambda rig: rig.deliver(Quiesce(1), version=WIRE_VERSION + 1), "the peer speaks wire version"),
    "wrong body": (lambda rig: rig.deliver(Hello(0, 1)), "a worker that is ready got Hello"),
    "skipped plan": (lambda rig: rig.deliver(Plan(plan(7, decode=[0]))), "plan 7 arrived where 3 was due"),
    "impossible plan": (lambda rig: rig.deliver(Plan(plan(3, decode=[3]))), "in which no row was started"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_frames_end_the_worker_with_a_farewell_and_nothing_freed(rig: WorkerRig, breakage: str) -> None:
    """O15: red when a broken frame is skipped, answered or survived, or memory is touched after it."""
    rig.decode_and_prefill_in_flight()
    calls = len(rig.table.calls)
    deliver, cause = BREAKAGES[breakage]
    deliver(rig)
    with pytest.raises(Aborted):
        rig.worker.step()
    (farewell,) = [body for body in rig.said() if isinstance(body, Farewell)]
    assert farewell.cause.startswith("the core broke the protocol: ")
    assert cause in farewell.cause
    assert rig.aborts == ["exit 134"]
    assert set(rig.table.calls[calls:]) <= {"event_query"}


def test_o6_a_reply_that_can_t_be_sent_ends_the_worker(rig: WorkerRig) -> None:
    """O6: red when a lost reply is forgotten: the core would wait, or free what the work still touches."""
    rig.decode_and_prefill_in_flight()
    rig.table.run(rig.streams[Lane.PRIMARY], 99)
    rig.wire.full = True
    with pytest.raises(Aborted):
        rig.worker.step()
    assert rig.aborts == ["exit 134"]


def test_o6_an_error_outside_guarded_work_ends_the_worker(rig: WorkerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """O6, O14: red when building a result may fail without anybody hearing of it."""

    def fail() -> list[object]:
        raise KeyError("aggregation")

    rig.decode_and_prefill_in_flight()
    monkeypatch.setattr(rig.runner, "collect", fail)
    with pytest.raises(Aborted):
        rig.worker.step()
    (farewell,) = [body for body in rig.said() if isinstance(body, Farewell)]
    assert farewell.cause == "the worker failed outside guarded work: KeyError: 'aggregation'"


def test_o6_a_row_that_can_t_start_ends_the_worker(rig: WorkerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """O6: red when a plan's tables are half written and the worker goes on with them."""

    def fail(start: RowStart, batch: Batch) -> None:
        raise MemoryError("no room for the row")

    rig.decode_and_prefill_in_flight()
    monkeypatch.setattr(rig.compute, "start_row", fail)
    rig.deliver(Plan(plan(3, starts=[row(2, [7], [6])], chunks=[PrefillChunk(2, 0, 1, True)])))
    with pytest.raises(Aborted):
        rig.worker.step()
    (farewell,) = [body for body in rig.said() if isinstance(body, Farewell)]
    assert farewell.cause == "the worker failed outside guarded work: MemoryError: no room for the row"


def test_o7_quiesced_is_said_once_every_lane_is_proven_idle(rig: WorkerRig) -> None:
    """O7: red when the answer goes out before, or without, the synchronization of both lanes."""
    rig.decode_and_prefill_in_flight()
    idle_when_said: list[bool] = []
    rig.wire.on_send = lambda body: idle_when_said.append(rig.idle) if isinstance(body, Quiesced) else None
    rig.deliver(Quiesce(5))
    rig.worker.step()
    assert idle_when_said == [True]
    assert Quiesced(5) in rig.said()
    assert (rig.lanes.proven(Lane.PRIMARY), rig.lanes.proven(Lane.PREFILL)) == (2, 2)
    assert [body.result.step for body in rig.said() if isinstance(body, Result)] == [1, 2]


def test_o7_quiescence_that_can_t_be_proven_aborts(rig: WorkerRig) -> None:
    """O7, O1: red when Quiesced is said although a lane could not be synchronized."""
    rig.decode_and_prefill_in_flight()
    rig.script.faults["stream_synchronize"] = (Status.LAUNCH_FAILED, False)
    rig.deliver(Quiesce(5))
    with pytest.raises(Aborted):
        rig.worker.step()
    assert Quiesced(5) not in rig.said()


@pytest.mark.parametrize("how", ["shutdown", "lost core"])
def test_o13_leaving_proves_every_lane_idle_before_anything_is_freed(
    rig: WorkerRig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O6, O7, O13: red when a worker that is told to leave, or has lost its core, frees under running work."""
    rig.decode_and_prefill_in_flight()
    idle_when_freed: list[bool] = []
    monkeypatch.setattr(rig.compute, "close", lambda: idle_when_freed.append(rig.idle))
    leave(rig, how)
    assert idle_when_freed == [True]
    assert not rig.worker.running


@pytest.mark.parametrize("how", ["shutdown", "lost core"])
def test_o13_leaving_aborts_when_a_lane_can_t_be_proven_idle(
    rig: WorkerRig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O7, O13: red when anything is freed although a lane may still be running."""
    rig.decode_and_prefill_in_flight()
    freed: list[str] = []
    monkeypatch.setattr(rig.compute, "close", lambda: freed.append("close"))
    rig.script.faults["stream_synchronize"] = (Status.UNKNOWN, False)
    with pytest.raises(Aborted):
        leave(rig, how)
    assert (freed, rig.aborts) == ([], ["exit 134"])


def leave(rig: WorkerRig, how: str) -> None:
    if how == "lost core":
        rig.worker.lose_core()
        return
    rig.deliver(Shutdown())
    rig.worker.step()


class LateRow(Unconstrained):
    """Slot 1 has no mask until the test says so; its time is up at 1 s."""

    def __init__(self) -> None:
        self.there = False

    def late(self, slots: Int32) -> list[int]:
        return [] if self.there else [slot for slot in slots.tolist() if slot == 1]

    def awaited_until(self, slot: int) -> float | None:
        return 1.0 if slot == 1 and not self.there else None


@pytest.mark.parametrize("lane", [False, True])
def test_the_core_hears_of_a_late_row_before_it_has_caught_up(lane: bool) -> None:
    """Red when the news is sent before the result that names the row, twice, or only when something else arrives."""
    constraints = LateRow()
    rig = WorkerRig(constraints)
    starts = [row(0, [1, 2], [0]), row(1, IDS, [1, 2])]
    chunks = [PrefillChunk(0, 0, 2, True), PrefillChunk(1, 0, 6, True)]
    rig.deliver(Plan(plan(1, starts=starts, chunks=chunks, lane=lane)))
    rig.worker.step()
    constraints.there = True
    rig.worker.step()
    assert CaughtUp([1]) not in rig.said()
    constraints.there = False
    if lane:
        rig.deliver(Plan(plan(2)))
    for _ in range(2):
        rig.table.run_all()
        rig.worker.step()
    (prefill,) = [prefill for body in rig.said() if isinstance(body, Result) for prefill in body.result.prefills]
    assert (prefill.late, len(prefill.tokens)) == ([1], 4)
    assert rig.tables.computed[:2].tolist() == [2, 5]
    assert rig.worker.awaited(0.25)[1] == 0.75
    assert CaughtUp([1]) not in rig.said()
    constraints.there = True
    assert rig.worker.awaited(0.25)[1] == 0
    rig.worker.step()
    rig.worker.step()
    assert rig.said().count(CaughtUp([1])) == 1
    assert rig.worker.awaited(0.25)[1] is None


def test_a_late_row_whose_time_is_up_is_handed_back() -> None:
    """Red when the core never hears of a row that nobody finds a mask for: it would be late for ever."""
    constraints = LateRow()
    rig = WorkerRig(constraints)
    constraints.there = True
    rig.deliver(Plan(plan(1, starts=[row(1, IDS, [1, 2])], chunks=[PrefillChunk(1, 0, 6, True)])))
    rig.worker.step()
    rig.table.run_all()
    constraints.there = False
    rig.deliver(Plan(plan(2, decode=[1])))
    rig.worker.step()
    rig.table.run_all()
    rig.worker.step()
    late = [body.result for body in rig.said() if isinstance(body, Result)][-1]
    assert (late.step, late.late, late.tokens) == (2, [1], b"")
    rig.now = 0.9
    rig.worker.step()
    assert CaughtUp([1]) not in rig.said()
    rig.now = 1.0
    rig.worker.step()
    assert rig.said()[-1] == CaughtUp([1])
