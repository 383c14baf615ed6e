"""Engine core and worker in one thread, over real frames, on the fake device: a schedule is a list of small moves.

`Sim` owns both halves and nothing else: the real Engine, Scheduler, FrameChannel, Worker and Runner; time is a number,
the GPU's streams run when a move says so. Death is an exception here: `Aborted` where a worker's process would end.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from engine_core.device.driver import Driver
from engine_core.device.drop_queue import DropQueue
from engine_core.device.fail_stop import Unbounded
from engine_core.device.fake import FakeCompute
from engine_core.device.fake_driver import FakeTable
from engine_core.device.guard import LaunchGuard
from engine_core.device.lanes import Lanes, LaneStream
from engine_core.engine import Engine
from engine_core.errors import EngineDead
from engine_core.executor.channel import FrameChannel, Plan, Result
from engine_core.ledger import Ledger
from engine_core.request import (
    Finish,
    ModelLimits,
    Output,
    RawSampling,
    Request,
    prefix_chain,
    resolve,
)
from engine_core.scheduler import Scheduler
from engine_core.step import Lane, StepPlan, StepResult
from engine_core.worker.inputs import RowTables
from engine_core.worker.runner import Runner
from engine_core.worker.worker import Worker

PAGE, SLOTS, CONTEXT, VOCAB = 4, 6, 96, 997
HANG = -1
"""A fault's status for a call that never returns: the watchdog ends the process."""


class Aborted(BaseException):
    """Where the worker's process would have ended."""


class Faults:
    """The script of a simulated driver: one fault at call number `at`, counted from the start of serving."""

    def __init__(self) -> None:
        self.armed: dict[int, tuple[int, bool]] = {}
        self.sticky = False
        self.count = -1
        """-1: not counting yet (start-up)."""
        self.hung: Any = None

    def fault(self, call: str) -> tuple[int, bool] | None:
        if self.count < 0:
            return None
        self.count += 1
        found = self.armed.get(self.count)
        if found is None and self.sticky:
            found = next((fault for at, fault in self.armed.items() if at < self.count), None)
        if found is not None and found[0] == HANG:
            if call == "event_query":
                return (600, False)
            self.hung(f"{call} did not end")
        return found

    def progress(self, table: FakeTable) -> None:
        """Streams run by moves only."""


class Wire:
    """Both ends of a frame stream."""

    def __init__(self, out: deque[bytes], back: deque[bytes]) -> None:
        self._out, self._back = out, back

    def send(self, data: bytes) -> None:
        self._out.append(data)

    def receive(self) -> bytes | None:
        return self._back.popleft() if self._back else None


class SimExecutor:
    """An Executor over the wire whose worker's death is known at once."""

    def __init__(self, channel: FrameChannel) -> None:
        self._channel = channel
        self.death: str | None = None
        self.lane_steps: set[int] = set()
        """Steps that launched a prefill on its own lane."""
        self.tamper: Any = None
        """Changes results on the way in, for lost and mismatched ones."""

    def submit(self, plan: StepPlan) -> None:
        if self.death is not None:
            raise EngineDead(f"worker 0 aborted: {self.death}")
        if plan.prefill_lane:
            self.lane_steps.add(plan.step)
        self._channel.send(Plan(plan))

    def collect(self) -> list[StepResult]:
        results: list[StepResult] = []
        while (body := self._channel.receive()) is not None:
            assert isinstance(body, Result)
            results.append(body.result if self.tamper is None else self.tamper(body.result))
        if self.death is not None and not results:
            raise EngineDead(f"worker 0 aborted: {self.death}")
        return results

    def quiesce(self) -> None:
        raise AssertionError("the simulation never asks")

    @property
    def quiesced(self) -> bool:
        return True


class Sim:
    """One engine, one worker. `overlap`: off, stream or green."""

    def __init__(
        self, *, overlap: str = "off", depth: int = 2, pages: int = 40, budget: int = 24, prefix_caching: bool = True
    ) -> None:
        self.faults = Faults()
        self.faults.hung = self._abort
        self.table = FakeTable(self.faults)
        self.abort_cause: str | None = None
        self.calls_at_abort = 0
        self.dead = False
        self.now = 0.0
        to_worker: deque[bytes] = deque()
        to_core: deque[bytes] = deque()
        self.executor = SimExecutor(FrameChannel(Wire(to_worker, to_core)))
        self.worker = self._worker(FrameChannel(Wire(to_core, to_worker)), overlap, depth, pages)
        self.scheduler = Scheduler(
            max_num_seqs=SLOTS,
            max_num_batched_tokens=budget,
            page_size=PAGE,
            total_pages=pages,
            max_model_len=CONTEXT,
            max_queue=64,
            eos_token_ids=(3,),
            async_depth=depth,
            prefix_caching=prefix_caching,
            overlap=overlap != "off",
        )
        self.engine = Engine(self.scheduler, Ledger(), self.executor, self._publish)
        self.limits = ModelLimits(VOCAB, CONTEXT, PAGE, pages, (3,))
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.prompts: dict[int, list[int]] = {}
        self.engine_dead: str | None = None
        self.faults.count = 0

    def _worker(self, channel: FrameChannel, overlap: str, depth: int, pages: int) -> Worker:
        _, primary = self.table.stream_create(0, 0)
        self.streams: dict[Lane, Any] = {Lane.PRIMARY: primary}
        lane_streams = {Lane.PRIMARY: LaneStream(primary)}
        if overlap == "green":
            _, context = self.table.green_ctx_create("descriptor")
            _, self.streams[Lane.PREFILL] = self.table.green_ctx_stream_create(context, 0, 0)
            lane_streams[Lane.PREFILL] = LaneStream(self.streams[Lane.PREFILL], context)
        elif overlap == "stream":
            _, self.streams[Lane.PREFILL] = self.table.stream_create(0, 0)
            lane_streams[Lane.PREFILL] = LaneStream(self.streams[Lane.PREFILL])
        compute = FakeCompute(
            self.table,
            self.streams,
            total_pages=pages,
            page_size=PAGE,
            max_num_seqs=SLOTS,
            max_model_len=CONTEXT,
            vocab_size=VOCAB,
            rings=depth + 1,
        )
        self.compute = compute
        self.drops = DropQueue()
        self.lanes = Lanes(Driver(self.table, Unbounded()), lane_streams, self._abort)
        self.runner = Runner(
            compute=compute,
            lanes=self.lanes,
            guard=LaunchGuard(self.lanes, self.drops, self._abort, compute.is_fatal),
            drops=self.drops,
            tables=RowTables(
                max_num_seqs=SLOTS, max_model_len=CONTEXT, page_size=PAGE, total_pages=pages, vocab_size=VOCAB
            ),
            async_depth=depth,
            now=lambda: self.now,
        )
        self._observe()
        return Worker(channel, self.runner, Unbounded(), self._abort, wait_timeout=100.0)

    def _observe(self) -> None:
        """Note every error that leaves the worker, and every release of memory, while a lane's work is unproven."""
        self.errors_unproven: list[str] = []
        self.freed_unproven: list[str] = []
        collect, close = self.runner.collect, self.compute.close

        def observed_collect() -> list[StepResult]:
            results = collect()
            for result in results:
                if result.error is not None and self.lanes.proven(Lane.PRIMARY) < result.step:
                    self.errors_unproven.append(result.error)
                for prefill in result.prefills:
                    lane = Lane.PREFILL if prefill.step in self.executor.lane_steps else Lane.PRIMARY
                    if prefill.error is not None and self.lanes.proven(lane) < prefill.step:
                        self.errors_unproven.append(prefill.error)
            return results

        def observed_close() -> None:
            if any(stream.queue for stream in self.streams.values()):
                self.freed_unproven.append("close")
            close()

        self.runner.collect = observed_collect  # type: ignore[method-assign]
        self.compute.close = observed_close  # type: ignore[method-assign]

    def _abort(self, what: str, error: BaseException | None = None) -> Any:
        if self.abort_cause is None:
            self.abort_cause = what if error is None else f"{what}: {error}"
            self.calls_at_abort = len(self.table.calls)
        raise Aborted(self.abort_cause)

    def _publish(self, outputs: list[Output]) -> None:
        for output in outputs:
            for number, token in zip(output.numbers.tolist(), output.tokens.tolist(), strict=True):
                assert number not in self.finishes, "a token came after the last word"
                self.tokens.setdefault(number, []).append(token)
            for finish in output.finishes:
                assert finish.number not in self.finishes, "two last words"
                self.finishes[finish.number] = finish

    # ---------------------------------------------------------------- moves

    def add(
        self,
        number: int,
        prompt: list[int],
        max_tokens: int,
        *,
        priority: int = 0,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        """Submit a request that ends by length alone, unless it has stop ids. A dead engine takes none."""
        if self.engine_dead is not None:
            return
        ids = np.array(prompt, np.int32)
        raw = RawSampling(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stop_token_ids)
        self.prompts[number] = prompt
        self.engine.submit(
            Request(
                session=1,
                number=number,
                ids=ids,
                hashes=prefix_chain(ids, PAGE, None),
                salt=None,
                params=resolve(raw, len(prompt), self.limits, 7),
                priority=priority,
            ),
            self.now,
        )

    def step_engine(self) -> None:
        """One call of the engine; its death fails everything open, as the process around it does."""
        if self.engine_dead is not None:
            return
        try:
            self.engine.step(self.now)
        except EngineDead as error:
            self.engine_dead = str(error)
            self.engine.fail_all(str(error))

    def step_worker(self) -> None:
        if self.dead:
            return
        try:
            self.worker.step()
            completion, _ = self.worker.awaited(self.now)
            if completion is not None and not any(stream.queue for stream in self.streams.values()):
                self.worker.awaited(self.now + 1000.0)  # nothing left to run: the bound is what ends it
        except Aborted:
            self.dead = True
            self.executor.death = self.abort_cause

    def run_stream(self, lane: Lane, count: int) -> None:
        if lane in self.streams:
            self.table.run(self.streams[lane], count)

    def shut_down(self) -> None:
        """What the core does at its end: a last word for everybody, then the worker leaves."""
        self.engine_dead = "shut down"
        self.engine.fail_all("shut down")
        try:
            self.runner.close()
        except Aborted:
            self.executor.death = self.abort_cause
        self.dead = True

    def settle(self, limit: int = 600) -> None:
        """Turn until everything has its last word or the engine is dead."""
        for _ in range(limit):
            self.step_engine()
            self.step_worker()
            self.table.run_all()
            self.step_worker()
            if self.engine_dead is not None or (self.engine.open_count == 0 and not self.scheduler.in_flight.working):
                self.step_engine()
                return
        raise AssertionError(f"{self.engine.open_count} sequences never ended")

    # --------------------------------------------------------------- truth

    def expected(self, number: int, count: int) -> list[int]:
        """What an uncontended row draws: FakeCompute's arithmetic without pages, slots or lanes."""
        ids = list(self.prompts[number])
        drawn: list[int] = []
        weights = [int(weight) for weight in self.compute.weights]
        total = sum((token + 1) * weights[position] for position, token in enumerate(ids)) % 2**64
        for _ in range(count):
            drawn.append(_mix(total) % VOCAB)
            total = (total + (drawn[-1] + 1) * weights[len(ids) + len(drawn) - 1]) % 2**64
        return drawn

    def check_tokens(self) -> None:
        for number, tokens in self.tokens.items():
            assert tokens == self.expected(number, len(tokens)), f"request {number} drew other tokens"


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)
