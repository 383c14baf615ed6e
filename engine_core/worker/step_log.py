"""The step log: what a worker did when, one JSON object a line (`--step-log FILE`, read by `greenlane trace`).

Owns the lines. The first is a `header`; times are µs since its `unix_time`. Of the others, `launch` is one plan taken
in by the host, `prefill_launch` and `complete` are the two ends of a batch on the prefill lane, `decode` is one step's
work on the primary lane (decode rows, and what chunks share their forward), `join` draws the tokens of a complete batch
there, `failed` is work that never completed, `wait` and `idle` are the host asleep, with and without work in flight. No
line holds token ids or text. A worker that is started again appends a further header.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from engine_core.device.base import Batch, Device
from engine_core.device.lanes import Completion
from engine_core.device.timing import GpuTimer, HostTimer, Span, Timer
from engine_core.step import Lane, StepPlan
from engine_core.worker.line_writer import LineWriter, open_lines

VERSION = 1
LANES = {lane: lane.name.lower() for lane in Lane}


class _Line(msgspec.Struct, tag_field="event", tag=str.lower):
    pass


class Header(_Line, kw_only=True):
    """`clock` says who stamped the starts and ends: gpu (timing events) or host. SMs of a lane: 0 where none count."""

    version: int
    greenlane: str
    unix_time: float
    model: str
    device: str
    rank: int
    overlap: str
    decode_sms: int
    prefill_sms: int
    clock: str


class Launch(_Line):
    """`at` to `at` + `host_us`: the plan enqueued. `lane` is the chunks'."""

    step: int
    at: int
    host_us: int
    decode_rows: int
    chunk_tokens: int
    lane: str


class PrefillLaunch(_Line, tag="prefill_launch"):
    """`decode_sms`: left to decode while it runs; 0 where none count."""

    step: int
    at: int
    rows: int
    chunk_tokens: int
    decode_sms: int


class Decode(_Line):
    """`beside`: a prefill was in flight at the launch, so the step kept to its share of the SMs."""

    step: int
    start: float
    end: float
    decode_rows: int
    chunk_tokens: int
    beside: bool


class Complete(_Line):
    step: int
    start: float
    end: float
    rows: int
    chunk_tokens: int


class Join(_Line):
    """`step` draws, on the primary lane, for the batch that step `prefill` had launched."""

    step: int
    prefill: int
    start: float
    end: float


class Failed(_Line):
    step: int
    lane: str
    at: int


class Wait(_Line):
    """Asleep until the completion of `step` on `lane`, or whatever came first."""

    step: int
    lane: str
    at: int
    us: int


class Idle(_Line):
    at: int
    us: int


class Dropped(_Line):
    """So many lines are missing here: the file was slower than the worker."""

    lines: int


class StepLog(Protocol):
    """What the runner and the worker's loop tell. Seconds are those of the worker's clock."""

    def begin(self, lane: Lane) -> Span | None:
        """Work is about to be enqueued on the lane. Raises DriverError."""

    def finish(self, span: Span | None) -> None:
        """The work is enqueued. Raises DriverError."""

    def launched(self, plan: StepPlan, decode_rows: int, since: float) -> None:
        """The host has enqueued the plan that it began with at `since`."""

    def prefill_launched(self, batch: Batch) -> None: ...

    def completed(self, batch: Batch, span: Span | None) -> None:
        """The batch's forward is proven complete, or failed and its lane is proven idle. Raises DriverError."""

    def joined(self, step: int, batch: Batch, span: Span | None) -> None:
        """So is what `step` drew for a batch of the prefill lane. Raises DriverError."""

    def waited(self, completion: Completion | None, since: float) -> None:
        """The loop slept since then, for this completion or for nothing in particular."""

    def close(self) -> None:
        """Bring what was told to the file, within a bound; free the timing events. Every lane is proven idle."""


class NoStepLog:
    """Tells nobody."""

    def begin(self, lane: Lane) -> Span | None:
        return None

    def finish(self, span: Span | None) -> None:
        return None

    def launched(self, plan: StepPlan, decode_rows: int, since: float) -> None:
        return None

    def prefill_launched(self, batch: Batch) -> None:
        return None

    def completed(self, batch: Batch, span: Span | None) -> None:
        return None

    def joined(self, step: int, batch: Batch, span: Span | None) -> None:
        return None

    def waited(self, completion: Completion | None, since: float) -> None:
        return None

    def close(self) -> None:
        return None


NO_STEP_LOG = NoStepLog()


class FileStepLog:
    """Lines to a writer, spans from a timer. `now` counts in seconds; `origin` is µs 0; `decode_sms` by partition."""

    def __init__(
        self,
        writer: LineWriter,
        timer: Timer,
        now: Callable[[], float],
        origin: float,
        decode_sms: Sequence[int] = (),
    ) -> None:
        self._writer = writer
        self._timer = timer
        self._now = now
        self._origin = origin
        self._decode_sms = decode_sms
        self._encoder = msgspec.json.Encoder()

    def write(self, line: _Line) -> None:
        self._writer.append(self._encoder.encode(line) + b"\n")

    def _us(self, moment: float) -> int:
        return round((moment - self._origin) * 1e6)

    def begin(self, lane: Lane) -> Span | None:
        return None if self._writer.ended else self._timer.begin(lane)

    def finish(self, span: Span | None) -> None:
        if span is not None:
            self._timer.finish(span)

    def launched(self, plan: StepPlan, decode_rows: int, since: float) -> None:
        tokens = sum(chunk.length for chunk in plan.chunks)
        lane = Lane.PREFILL if plan.prefill_lane else Lane.PRIMARY
        at = self._us(since)
        self.write(Launch(plan.step, at, self._us(self._now()) - at, decode_rows, tokens, LANES[lane]))

    def prefill_launched(self, batch: Batch) -> None:
        sms = self._decode_sms[batch.partition or 0] if self._decode_sms else 0
        self.write(PrefillLaunch(batch.step, self._us(self._now()), len(batch.slots), len(batch.ids), sms))

    def completed(self, batch: Batch, span: Span | None) -> None:
        if span is None:
            return
        if span.end is None:
            self._timer.drop(span)
            self.write(Failed(batch.step, LANES[batch.lane], self._us(self._now())))
            return
        start, end = (round(us, 1) for us in self._timer.read(span))
        if batch.lane is Lane.PRIMARY:
            self.write(Decode(batch.step, start, end, batch.decode_rows, len(batch.ids), batch.partition is not None))
        else:
            self.write(Complete(batch.step, start, end, len(batch.slots), len(batch.ids)))

    def joined(self, step: int, batch: Batch, span: Span | None) -> None:
        if span is None:
            return
        if span.end is None:
            self._timer.drop(span)
            return
        start, end = (round(us, 1) for us in self._timer.read(span))
        self.write(Join(step, batch.step, start, end))

    def waited(self, completion: Completion | None, since: float) -> None:
        at = self._us(since)
        us = self._us(self._now()) - at
        if completion is None:
            self.write(Idle(at, us))
        else:
            self.write(Wait(completion.sequence, LANES[completion.lane], at, us))

    def close(self) -> None:
        self._timer.close()
        self._writer.close()


def open_step_log(
    path: Path,
    device: Device,
    *,
    model: str,
    overlap: str,
    rank: int,
    greenlane: str,
    now: Callable[[], float],
    unix_time: float,
) -> FileStepLog:
    """The log of a worker whose device is open. Raises ConfigError when the file can't be written."""
    origin = now()

    def now_us() -> float:
        return (now() - origin) * 1e6

    file = open_lines(path)
    timer = GpuTimer(device.driver, device.streams, now_us) if device.timed else HostTimer(now_us)
    writer = LineWriter(file, lambda count: msgspec.json.encode(Dropped(count)) + b"\n")
    step_log = FileStepLog(writer, timer, now, origin, device.lanes.choices)
    step_log.write(
        Header(
            version=VERSION,
            greenlane=greenlane,
            unix_time=unix_time,
            model=model,
            device=device.name,
            rank=rank,
            overlap=overlap,
            decode_sms=device.lanes.decode_sms,
            prefill_sms=device.lanes.prefill_sms,
            clock=timer.clock,
        )
    )
    return step_log
