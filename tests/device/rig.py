"""A runner on the fake device: scripted streams, plans from short notation, results as plain values."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine_core.device.driver import Driver
from engine_core.device.drop_queue import DropQueue
from engine_core.device.fail_stop import Unbounded
from engine_core.device.fake import FakeCompute
from engine_core.device.fake_driver import FakeTable
from engine_core.device.guard import LaunchGuard
from engine_core.device.lanes import Lanes, LaneStream
from engine_core.step import Lane, PrefillChunk, RowSampling, RowStart, StepPlan
from engine_core.worker.inputs import RowTables
from engine_core.worker.runner import Runner
from engine_core.worker.unconstrained import UNCONSTRAINED, Constraints

PAGE = 4
PAGES = 32
SLOTS = 4
CONTEXT = 64
VOCAB = 1000


class Aborted(BaseException):
    """Stands for the end of the process."""


class Script:
    """Streams run when told (`run`), or at every query (`eager`); faults by the number of the call from now on."""

    def __init__(self, eager: bool = True) -> None:
        self.eager = eager
        self.faults: dict[str, tuple[int, bool]] = {}

    def fault(self, call: str) -> tuple[int, bool] | None:
        return self.faults.get(call)

    def progress(self, table: FakeTable) -> None:
        if self.eager:
            table.run_all()


class RunnerRig:
    """`green` gives the prefill lane a Green Context's stream; `overlap` False leaves it out."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        overlap: bool = True,
        depth: int = 3,
        whole_context: bool = True,
        partitions: int = 1,
        constraints: Constraints = UNCONSTRAINED,
    ) -> None:
        self.script = Script() if script is None else script
        self.table = FakeTable(self.script)
        _, primary = self.table.stream_create(0, 0)
        self.streams: dict[Lane, Any] = {Lane.PRIMARY: primary}
        lane_streams = {Lane.PRIMARY: LaneStream(primary)}
        self.prefills: list[LaneStream] = []
        """By partition."""
        if overlap:
            self.prefills = [self._prefill_stream() for _ in range(partitions)]
            self.streams[Lane.PREFILL] = self.prefills[-1].stream
            lane_streams[Lane.PREFILL] = self.prefills[-1]
        self.aborts: list[str] = []
        self.compute = FakeCompute(
            self.table,
            self.streams,
            total_pages=PAGES,
            page_size=PAGE,
            max_num_seqs=SLOTS,
            max_model_len=CONTEXT,
            vocab_size=VOCAB,
            rings=depth + 1,
            whole_context=whole_context,
            partitions=[target.stream for target in self.prefills] if partitions > 1 else (),
        )
        self.now = 0.0
        self.drops = DropQueue()
        self.lanes = Lanes(Driver(self.table, Unbounded()), lane_streams, self.abort)
        self.guard = LaunchGuard(self.lanes, self.drops, self.abort, self.compute.is_fatal)
        self.tables = RowTables(
            max_num_seqs=SLOTS, max_model_len=CONTEXT, page_size=PAGE, total_pages=PAGES, vocab_size=VOCAB
        )
        self.runner = Runner(
            compute=self.compute,
            lanes=self.lanes,
            guard=self.guard,
            drops=self.drops,
            tables=self.tables,
            async_depth=depth,
            partitions=self.prefills if partitions > 1 else (),
            now=lambda: self.now,
            constraints=constraints,
        )

    def _prefill_stream(self) -> LaneStream:
        _, context = self.table.green_ctx_create("descriptor")
        _, stream = self.table.green_ctx_stream_create(context, 0, 0)
        return LaneStream(stream, context)

    def abort(self, what: str, error: BaseException | None = None) -> Any:
        self.aborts.append(f"{what}: {error}")
        raise Aborted(what)

    def run(self, *plans: StepPlan) -> list[list[int]]:
        """Launch and collect plan by plan; the decode and prefill tokens of each result."""
        tokens: list[list[int]] = []
        for step in plans:
            self.runner.launch(step)
            for result in self.runner.collect():
                drawn = ints(result.tokens)
                for prefill in result.prefills:
                    drawn += ints(prefill.tokens)
                tokens.append(drawn)
        return tokens


def ints(data: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(data, "<i4")]


def packed(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def row(slot: int, ids: list[int], pages: list[int], *, cached: int = 0, **sampling: Any) -> RowStart:
    return RowStart(slot, len(ids), packed(ids), cached, packed(pages), RowSampling(**sampling))


def plan(
    step: int,
    *,
    starts: list[RowStart] | None = None,
    decode: list[int] | None = None,
    chunks: list[PrefillChunk] | None = None,
    pages: dict[int, int] | None = None,
    lane: bool = False,
    partition: int = 0,
) -> StepPlan:
    """`pages` appends one page to each slot named."""
    pages = {} if pages is None else pages
    return StepPlan(
        *(step, starts or [], packed(list(pages)), packed(list(pages.values())), packed(decode or []), chunks or []),
        prefill_lane=lane,
        partition=partition,
    )
