"""The step log without a process: lines by value, times from a simulated GPU clock."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine_core.device.driver import EVENT_FLAGS, TIMING_EVENT_FLAGS, Driver, DriverError, Status
from engine_core.device.drop_queue import DropQueue
from engine_core.device.fail_stop import Unbounded
from engine_core.device.fake import FakeCompute
from engine_core.device.fake_driver import FakeTable
from engine_core.device.guard import LaunchGuard
from engine_core.device.lanes import Lanes, LaneStream
from engine_core.device.timing import GpuTimer, HostTimer, Timer
from engine_core.step import Lane, PrefillChunk
from engine_core.worker.inputs import RowTables
from engine_core.worker.line_writer import LineWriter
from engine_core.worker.runner import Runner
from engine_core.worker.step_log import NO_STEP_LOG, FileStepLog, StepLog
from tests.device.rig import CONTEXT, PAGE, PAGES, SLOTS, VOCAB, Aborted, Script, plan, row
from tests.unit.memory_file import Full, Memory

GUARD_S = 60.0
IDS = [5, 6, 7, 8, 9, 10]


class ClockedTable(FakeTable):
    """Its GPU clock advances by `cost_ms` with all work that runs; waits are free. Elapsed times are float32, as in
    CUDA."""

    def __init__(self, script: Script, cost_ms: float = 1.0) -> None:
        super().__init__(script)
        self.cost_ms = cost_ms
        self.gpu_ms = 0.0
        self.stamps: dict[int, list[float]] = {}
        self.flags: list[int] = []

    def run(self, stream: Any, count: int) -> int:
        done = 0
        while done < count and stream.queue:
            cost = 0.0 if stream.queue[0].run is None else self.cost_ms
            if not super().run(stream, 1):
                break
            self.gpu_ms += cost
            self.stamps.setdefault(stream.thread, []).append(self.gpu_ms)
            done += 1
        return done

    def event_create(self, flags: int) -> tuple[int, Any]:
        self.flags.append(flags)
        return super().event_create(flags)

    def moment(self, event: Any) -> float:
        """The clock when the stream had run all that was enqueued before the event."""
        return self.stamps[event.stream.thread][event.position - 1] if event.position else 0.0

    def event_elapsed_ms(self, start: Any, end: Any) -> tuple[int, float]:
        assert start.reached(), "elapsed time of an event that isn't complete"
        assert end.reached(), "elapsed time of an event that isn't complete"
        elapsed = float(np.float32(self.moment(end) - self.moment(start)))
        return self._answer("event_elapsed_ms", lambda: (Status.SUCCESS, elapsed), 0.0)


class Rig:
    """A runner over a green prefill lane with a step log into a list of lines, or without one."""

    def __init__(self, *, eager: bool = True, log: bool = True, clock: str = "gpu") -> None:
        self.script = Script(eager)
        self.table = ClockedTable(self.script)
        _, primary = self.table.stream_create(0, 0)
        _, context = self.table.green_ctx_create("descriptor")
        _, prefill = self.table.green_ctx_stream_create(context, 0, 0)
        self.streams: dict[Lane, Any] = {Lane.PRIMARY: primary, Lane.PREFILL: prefill}
        targets = {Lane.PRIMARY: LaneStream(primary), Lane.PREFILL: LaneStream(prefill, context)}
        self.now = 100.0
        self.file = Memory()
        driver = Driver(self.table, Unbounded())
        self.step_log: StepLog = NO_STEP_LOG
        if log:
            timer: Timer = GpuTimer(driver, targets, self.now_us) if clock == "gpu" else HostTimer(self.now_us)
            writer = LineWriter(self.file, lambda count: b"dropped %d\n" % count, interval_s=0.0)
            self.step_log = FileStepLog(writer, timer, lambda: self.now, 100.0)
        self.aborts: list[str] = []
        compute = FakeCompute(
            self.table,
            self.streams,
            total_pages=PAGES,
            page_size=PAGE,
            max_num_seqs=SLOTS,
            max_model_len=CONTEXT,
            vocab_size=VOCAB,
            rings=4,
        )
        self.compute = compute
        lanes, drops = Lanes(driver, targets, self.abort), DropQueue()
        tables = RowTables(
            max_num_seqs=SLOTS, max_model_len=CONTEXT, page_size=PAGE, total_pages=PAGES, vocab_size=VOCAB
        )
        self.runner = Runner(
            compute=compute,
            lanes=lanes,
            guard=LaunchGuard(lanes, drops, self.abort, compute.is_fatal),
            drops=drops,
            tables=tables,
            async_depth=3,
            now=lambda: self.now,
            step_log=self.step_log,
        )

    def now_us(self) -> float:
        return (self.now - 100.0) * 1e6

    def abort(self, what: str, error: BaseException | None = None) -> Any:
        self.aborts.append(f"{what}: {error}")
        raise Aborted(what)

    def overlapped(self) -> None:
        """A row's prompt alone; another's on the prefill lane, with two decode steps beside; then the join."""
        primary, prefill = self.streams[Lane.PRIMARY], self.streams[Lane.PREFILL]
        self.runner.launch(plan(1, starts=[row(0, [1, 2], [0, 1])], chunks=[PrefillChunk(0, 0, 2, True)]))
        self.table.run(primary, 99)
        self.runner.collect()
        start, chunk = row(1, IDS, [2, 3]), PrefillChunk(1, 0, 6, True)
        self.runner.launch(plan(2, starts=[start], decode=[0], chunks=[chunk], lane=True))
        cost, self.table.cost_ms = self.table.cost_ms, 0.0
        self.table.run(prefill, 1)  # its row's tables, in no time
        self.table.cost_ms = cost
        self.table.run(primary, 99)
        self.runner.collect()
        self.runner.launch(plan(3, decode=[0]))
        self.table.run(primary, 99)
        self.runner.collect()
        self.table.run(prefill, 99)
        self.now += 0.25
        self.runner.launch(plan(4, decode=[0]))
        self.table.run(primary, 99)
        self.runner.collect()

    def lines(self) -> list[dict[str, Any]]:
        """What was logged, after the runner's end."""
        self.runner.close()
        return [json.loads(line) for line in self.file.data.splitlines()]


# ------------------------------ what is logged


def test_lines_tell_what_ran_when() -> None:
    """Red when a plan, a batch or a join is missing, its figures are another's, or a span isn't its work's own: forward
    and sample are two operations of 1 ms each, and the prefill's one runs after both decode steps."""
    rig = Rig(eager=False)
    rig.overlapped()
    lines = rig.lines()
    assert [line for line in lines if line["event"] == "launch"] == [
        {"event": "launch", "step": 1, "at": 0, "host_us": 0, "decode_rows": 0, "chunk_tokens": 2, "lane": "primary"},
        {"event": "launch", "step": 2, "at": 0, "host_us": 0, "decode_rows": 1, "chunk_tokens": 6, "lane": "prefill"},
        {"event": "launch", "step": 3, "at": 0, "host_us": 0, "decode_rows": 1, "chunk_tokens": 0, "lane": "primary"},
        {
            "event": "launch",
            "step": 4,
            "at": 250000,
            "host_us": 0,
            "decode_rows": 1,
            "chunk_tokens": 0,
            "lane": "primary",
        },
    ]
    decodes = [line for line in lines if line["event"] == "decode"]
    assert [(line["step"], line["decode_rows"], line["chunk_tokens"]) for line in decodes] == [
        (1, 0, 2),
        (2, 1, 0),
        (3, 1, 0),
        (4, 1, 0),
    ]
    assert [line["beside"] for line in decodes] == [False, True, True, False]
    assert [line["end"] - line["start"] for line in decodes] == [2000.0] * 4
    (launched,) = (line for line in lines if line["event"] == "prefill_launch")
    assert launched == {"event": "prefill_launch", "step": 2, "at": 0, "rows": 1, "chunk_tokens": 6, "decode_sms": 0}
    (batch,) = (line for line in lines if line["event"] == "complete")
    assert (batch["step"], batch["rows"], batch["chunk_tokens"]) == (2, 1, 6)
    assert batch["start"] <= decodes[1]["start"]
    assert batch["end"] >= decodes[2]["end"]
    (join,) = (line for line in lines if line["event"] == "join")
    assert (join["step"], join["prefill"], join["end"] - join["start"]) == (4, 2, 1000.0)
    assert rig.aborts == []


def test_lines_hold_no_token_ids() -> None:
    """Red when a line carries anything but numbers that describe the work."""
    rig = Rig()
    rig.overlapped()
    keys = {key for line in rig.lines() for key in line}
    assert keys == {
        *("event", "step", "at", "host_us", "decode_rows", "chunk_tokens", "lane", "start", "end", "beside", "rows"),
        *("prefill", "decode_sms"),
    }


def test_times_of_the_host_where_events_tell_none() -> None:
    """Red when a device without timing events logs zeros: its spans last until completion was seen."""
    rig = Rig(eager=False, clock="host")
    rig.overlapped()
    (batch,) = (line for line in rig.lines() if line["event"] == "complete")
    assert (batch["start"], batch["end"]) == (0.0, 250000.0)
    assert TIMING_EVENT_FLAGS not in rig.table.flags


def test_sleep_is_logged_by_what_it_is_for() -> None:
    """Red when waiting for the GPU and having nothing to do look alike."""
    rig = Rig(eager=False)
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0])], chunks=[PrefillChunk(0, 0, 2, True)]))
    awaited = rig.runner.awaited()
    rig.now += 0.003
    rig.step_log.waited(awaited, 100.001)
    rig.step_log.waited(None, 100.002)
    sleep = [line for line in rig.lines() if line["event"] in ("wait", "idle")]
    assert sleep == [
        {"event": "wait", "step": 1, "lane": "primary", "at": 1000, "us": 2000},
        {"event": "idle", "at": 2000, "us": 1000},
    ]


def test_failed_work_is_logged_and_its_mark_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a forward that raises leaves its span open (its event is lost) or looks like a completed step."""
    rig = Rig()
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.runner.collect()
    forward = rig.compute.forward

    def fail(*args: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(rig.compute, "forward", fail)
    rig.runner.launch(plan(2, decode=[0]))
    assert [result.error is not None for result in rig.runner.collect()] == [True]
    monkeypatch.setattr(rig.compute, "forward", forward)
    created = rig.table.flags.count(TIMING_EVENT_FLAGS)
    rig.runner.launch(plan(3, decode=[0]))
    rig.runner.collect()
    assert rig.table.flags.count(TIMING_EVENT_FLAGS) == created
    lines = rig.lines()
    assert [line["step"] for line in lines if line["event"] == "decode"] == [1, 3]
    assert [line for line in lines if line["event"] == "failed"] == [
        {"event": "failed", "step": 2, "lane": "primary", "at": 0}
    ]


# ------------------------------ timing events


def test_e1_completions_carry_no_time_and_timing_events_exist_only_with_a_log() -> None:
    """E1: red when a completion is created with timing, or a worker without a step log creates timing events."""
    without, with_log = Rig(log=False), Rig()
    without.overlapped()
    with_log.overlapped()
    assert set(without.table.flags) == {EVENT_FLAGS}
    assert with_log.table.flags.count(EVENT_FLAGS) == len(without.table.flags)
    assert "event_elapsed_ms" not in without.table.calls


def test_e2_marks_on_a_green_stream_go_through_its_context() -> None:
    """E2: red when the timing events of the prefill lane are recorded on its stream (INVALID_HANDLE there)."""
    rig = Rig()
    rig.overlapped()
    assert rig.aborts == []
    assert rig.table.calls.count("green_ctx_record_event") == 2 + 1


def test_timing_events_are_few_and_go_with_the_runner() -> None:
    """Red when every step takes new events, or some outlive the runner."""
    rig = Rig()
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], list(range(10)))], chunks=[PrefillChunk(0, 0, 2, True)]))
    for step in range(2, 30):
        rig.runner.launch(plan(step, decode=[0]))
        rig.runner.collect()
    assert rig.table.flags.count(TIMING_EVENT_FLAGS) <= 8
    rig.lines()
    assert rig.table.live_events == 0


def test_o14_an_error_of_a_timing_call_is_no_smaller_than_another() -> None:
    """O14: red when a driver error in the log's own calls is swallowed: it may speak of the work itself."""
    rig = Rig()
    rig.script.faults["event_elapsed_ms"] = (Status.ILLEGAL_ADDRESS, False)
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0, 1])], chunks=[PrefillChunk(0, 0, 2, True)]))
    with pytest.raises(DriverError):
        rig.runner.collect()
    rig = Rig()
    rig.table.event_create = lambda flags: (Status.OUT_OF_MEMORY, None)  # type: ignore[method-assign]
    with pytest.raises(Aborted):
        rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0, 1])], chunks=[PrefillChunk(0, 0, 2, True)]))
    assert "event_create returned OUT_OF_MEMORY" in rig.aborts[0]


def test_times_stay_exact_over_hours() -> None:
    """Red when all times are told from one event: a float32 of milliseconds is off by 62 µs after ten minutes."""
    table = ClockedTable(Script(), cost_ms=977.123)
    _, stream = table.stream_create(0, 0)
    timer = GpuTimer(Driver(table, Unbounded()), {Lane.PRIMARY: LaneStream(stream)}, lambda: 0.0)
    open_span = timer.begin(Lane.PRIMARY)
    drift: list[float] = []
    errors: list[float] = []
    for _ in range(12000):
        span = timer.begin(Lane.PRIMARY)
        table.enqueue(stream, lambda: None)
        timer.finish(span)
        table.run_all()
        start, end = timer.read(span)
        errors.append(abs(end - start - table.cost_ms * 1e3))
        drift.append(abs(end - table.gpu_ms * 1e3) / end)
    assert table.gpu_ms > 3 * 3600e3
    assert max(errors) < 1.0  # µs
    assert max(drift) < 1e-7
    timer.finish(open_span)  # its base was replaced long ago
    assert abs(timer.read(open_span)[0]) < 1.0
    timer.close()
    assert table.live_events == 0


def test_after_a_full_disk_no_timing_events_are_made() -> None:
    """Red when a log that has ended still costs GPU events."""
    rig = Rig()
    rig.file.write = Full().write  # type: ignore[method-assign]
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0, 1])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.runner.collect()
    assert isinstance(rig.step_log, FileStepLog)
    rig.step_log._writer._thread.join(GUARD_S)
    before = len(rig.table.calls)
    rig.runner.launch(plan(2, decode=[0]))
    assert rig.table.calls[before:].count("event_record") == 1
