"""One rank of a simulation: the real Worker, Runner, Lanes and guard over simulated streams, and what is seen there.

Owns the faults of driver calls (`DriverFaults`) and of Python code (`PythonFault`), and the notes on what left the
worker unproven. Death is an exception here: `Aborted`, where the worker's process would end.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine_core.device.base import Batch, Int32, RowMask, Sampled
from engine_core.device.driver import Driver, Status
from engine_core.device.drop_queue import DropQueue
from engine_core.device.fail_stop import Unbounded
from engine_core.device.fake import FakeCompute
from engine_core.device.fake_driver import FakeTable
from engine_core.device.guard import LaunchGuard, Owned, WorkFailed
from engine_core.device.lanes import Lanes, LaneStream
from engine_core.executor.channel import FrameChannel
from engine_core.ops.masks import mask_words
from engine_core.step import GrammarPrepared, Lane, RowStart
from engine_core.worker.inputs import RowTables
from engine_core.worker.runner import Runner
from engine_core.worker.unconstrained import Refused, Unconstrained
from engine_core.worker.worker import Worker

PAGE, SLOTS, CONTEXT, VOCAB = 4, 6, 96, 997
WAIT_TIMEOUT = 100.0
ALL_ALLOWED = mask_words(np.arange(VOCAB), VOCAB)
PARTITIONS = 2
"""Of auto."""
HANG = -1
"""Status of a call that never returns: the watchdog ends the process. A query that hangs says "not ready"."""


class Aborted(BaseException):
    """Where the worker's process would have ended."""


@dataclass(slots=True)
class DriverFaults:
    """Faults by number of the driver call, counted over all ranks from the start of serving."""

    armed: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Number → status to answer, and whether the call takes effect."""
    sticky: bool = False
    """Once a fault was met, all later calls answer it too."""
    count: int = 0
    _met: tuple[int, bool] | None = None

    def next(self) -> tuple[int, bool] | None:
        self.count += 1
        found = self.armed.get(self.count, self._met)
        if self.sticky and found is not None:
            self._met = found
        return found


@dataclass(slots=True)
class PythonFault:
    """The `nth` call of a Compute method raises, before it does anything or when all its work is enqueued."""

    method: str = ""
    nth: int = 0
    after: bool = False
    error: type[Exception] = RuntimeError
    counts: dict[str, int] = field(default_factory=dict)

    def reached(self, method: str, *, after: bool) -> None:
        if not after:
            self.counts[method] = self.counts.get(method, 0) + 1
        if method == self.method and after is self.after and self.counts[method] == self.nth:
            raise self.error(f"call {self.nth} of {method} fails")


class RankScript:
    """A FakeTable's script: streams run by moves only, faults come from the simulation's one counter."""

    def __init__(self, rank: Rank, faults: DriverFaults) -> None:
        self._rank, self._faults = rank, faults
        self.serving = False

    def fault(self, call: str) -> tuple[int, bool] | None:
        if not self.serving:
            return None
        found = self._faults.next()
        if found is not None and found[0] == HANG:
            if call == "event_query":
                return Status.NOT_READY, False
            self._rank.abort(f"{call} did not end")
        return found

    def progress(self, table: FakeTable) -> None:
        """Moves do that."""


class ObservedCompute(FakeCompute):
    """FakeCompute with a Python fault, and a note when it is closed over unproven work."""

    rank: Rank

    def start_row(self, start: RowStart, batch: Batch) -> None:
        self.rank.python_fault.reached("start_row", after=False)
        super().start_row(start, batch)

    def forward(self, batch: Batch, ring: int) -> None:
        self.rank.python_fault.reached("forward", after=False)
        super().forward(batch, ring)
        self.rank.python_fault.reached("forward", after=True)

    def sample(self, batch: Batch, ring: int) -> None:
        self.rank.python_fault.reached("sample", after=False)
        super().sample(batch, ring)
        self.rank.python_fault.reached("sample", after=True)

    def read(self, batch: Batch, ring: int) -> Sampled:
        self.rank.python_fault.reached("read", after=False)
        sampled = super().read(batch, ring)
        self.rank.python_fault.reached("read", after=True)
        return sampled

    def close(self) -> None:
        if self.rank.busy:
            self.rank.freed_unproven.append("closed with work on a stream")
        super().close()


class ObservedGuard(LaunchGuard):
    """LaunchGuard that notes every error that leaves it while a stream still has work."""

    rank: Rank

    @contextlib.contextmanager
    def armed(self, *works: Owned) -> Iterator[None]:
        try:
            with super().armed(*works):
                yield
        except WorkFailed as failure:
            if self.rank.busy:
                self.rank.errors_unproven.append(str(failure))
            raise


class Wire:
    """Both ends of a frame stream."""

    def __init__(self, out: deque[bytes], back: deque[bytes]) -> None:
        self._out, self._back = out, back

    def send(self, data: bytes) -> None:
        self._out.append(data)

    def receive(self) -> bytes | None:
        return self._back.popleft() if self._back else None


class ScriptedMasks(Unconstrained):
    """Grammars that allow everything; a mask that isn't in time comes when a move says so."""

    def __init__(self, in_time: Sequence[bool]) -> None:
        self._in_time = itertools.cycle(in_time)
        self._there: dict[int, bool] = {}
        """By slot of a row that follows a grammar."""
        self._prepared: list[GrammarPrepared] = []
        self.times_late = 0

    def prepare(self, key: int, kind: str, text: str) -> None:
        self._prepared.append(GrammarPrepared(key))

    def outcomes(self) -> list[GrammarPrepared]:
        prepared, self._prepared = self._prepared, []
        return prepared

    def forget(self, key: int) -> None:
        """Its rows' slots are started anew before they draw again."""

    def start(self, slot: int, key: int, output: Int32) -> None:
        self._there.pop(slot, None)
        if key:
            self._there[slot] = next(self._in_time)

    def late(self, slots: Int32) -> list[int]:
        late = [slot for slot in slots.tolist() if not self._there.get(slot, True)]
        self.times_late += len(late)
        return late

    def awaited_until(self, slot: int) -> float | None:
        return None if self._there.get(slot, True) else WAIT_TIMEOUT

    def masks(self, slots: Int32) -> tuple[list[RowMask], list[Refused]]:
        rows = [RowMask(row, ALL_ALLOWED) for row, slot in enumerate(slots.tolist()) if slot in self._there]
        assert all(self._there[slots.item(mask.row)] for mask in rows), "a row draws without its mask"
        return rows, []

    def drawn(self, slots: Int32, tokens: Int32) -> None:
        for slot in slots.tolist():
            if slot in self._there:
                self._there[slot] = next(self._in_time)

    def arrive(self) -> None:
        """Every mask that was late is there."""
        self._there = dict.fromkeys(self._there, True)


class Rank:
    """A worker. `overlap`: off, stream, green, or auto, which has PARTITIONS."""

    def __init__(
        self, *, overlap: str, depth: int, pages: int, faults: DriverFaults, in_time: Sequence[bool] = (True,)
    ) -> None:
        """`in_time`: whether each mask that a row needs comes at once, counted over all rows, again and again."""
        self.masks = ScriptedMasks(in_time)
        to_worker: deque[bytes] = deque()
        to_core: deque[bytes] = deque()
        self.core_channel = FrameChannel(Wire(to_worker, to_core))
        self.python_fault = PythonFault()
        self.abort_cause: str | None = None
        self.calls_at_abort = 0
        self.dead = False
        self.errors_unproven: list[str] = []
        self.freed_unproven: list[str] = []
        script = RankScript(self, faults)
        self.table = FakeTable(script)
        self.streams, lane_streams = self._open_streams(overlap)
        self.compute = ObservedCompute(
            self.table,
            self.streams,
            total_pages=pages,
            page_size=PAGE,
            max_num_seqs=SLOTS,
            max_model_len=CONTEXT,
            vocab_size=VOCAB,
            rings=depth + 1,
            partitions=[target.stream for target in self.partitions],
        )
        self.compute.rank = self
        self.drops = DropQueue()
        self.lanes = Lanes(Driver(self.table, Unbounded()), lane_streams, self.abort)
        guard = ObservedGuard(self.lanes, self.drops, self.abort, self.compute.is_fatal)
        guard.rank = self
        self.runner = Runner(
            compute=self.compute,
            lanes=self.lanes,
            guard=guard,
            drops=self.drops,
            tables=RowTables(
                max_num_seqs=SLOTS, max_model_len=CONTEXT, page_size=PAGE, total_pages=pages, vocab_size=VOCAB
            ),
            async_depth=depth,
            partitions=self.partitions,
            now=lambda: 0.0,
            constraints=self.masks,
        )
        channel = FrameChannel(Wire(to_core, to_worker))
        self.worker = Worker(
            channel, self.runner, Unbounded(), self.abort, wait_timeout=WAIT_TIMEOUT, constraints=self.masks
        )
        script.serving = True

    def _open_streams(self, overlap: str) -> tuple[dict[Lane, Any], dict[Lane, LaneStream]]:
        self.partitions: list[LaneStream] = []
        _, primary = self.table.stream_create(0, 0)
        if overlap == "off":
            return {Lane.PRIMARY: primary}, {Lane.PRIMARY: LaneStream(primary)}
        if overlap == "stream":
            prefill = LaneStream(self.table.stream_create(0, 0)[1])
        elif overlap == "green":
            prefill = self._green_stream()
        else:
            self.partitions = [self._green_stream() for _ in range(PARTITIONS)]
            prefill = self.partitions[-1]
        lanes = {Lane.PRIMARY: LaneStream(primary), Lane.PREFILL: prefill}
        return {Lane.PRIMARY: primary, Lane.PREFILL: prefill.stream}, lanes

    def _green_stream(self) -> LaneStream:
        _, context = self.table.green_ctx_create("descriptor")
        _, stream = self.table.green_ctx_stream_create(context, 0, 0)
        return LaneStream(stream, context)

    @property
    def busy(self) -> bool:
        """Work is on a stream that hasn't run."""
        return any(stream.queue for stream in self.table.streams)

    def abort(self, what: str, error: BaseException | None = None) -> Any:
        if self.abort_cause is None:
            self.abort_cause = what if error is None else f"{what}: {error}"
            self.calls_at_abort = len(self.table.calls)
        raise Aborted(self.abort_cause)

    def step(self) -> None:
        """The worker's loop once. With nothing left to run, a completion that isn't there runs into its bound."""
        if self.dead:
            return
        try:
            self.worker.step()
            completion, left = self.worker.awaited(0.0)
            if left is not None and completion is not None and not self.busy:
                self.worker.awaited(WAIT_TIMEOUT)
        except Aborted:
            self.dead = True

    def run_stream(self, lane: Lane, count: int) -> None:
        primary = self.streams[Lane.PRIMARY]
        for stream in self.table.streams:
            if (stream is primary) is (lane is Lane.PRIMARY):
                self.table.run(stream, count)

    def shut_down(self) -> None:
        """Leave in good order, as far as that is possible."""
        if not self.dead:
            with contextlib.suppress(Aborted):
                self.worker.lose_core()
        self.dead = True
