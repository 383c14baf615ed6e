"""The real runner over the real device in this process, with faults where a test puts them and delays that hold lanes.

Owns the scenario: row 0 decodes, row 1's prompt is on the prefill lane, held there. Whatever a step's end releases is
filled with NaN at once, on a stream that nothing orders: a kernel that still ran would write over it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from engine_core.config import WorkerConfig
from engine_core.device.base import Batch, Device
from engine_core.device.driver import EVENT_FLAGS, Driver
from engine_core.device.fail_stop import Unbounded
from engine_core.device.lanes import record
from engine_core.executor.channel import Plan
from engine_core.step import Lane, PrefillChunk, RowSampling, RowStart, StepPlan, StepResult
from engine_core.worker.runner import Runner
from engine_core.worker.worker import Worker, build_runner
from tests.gpu.faults import FaultyCompute, FaultyTable
from tests.gpu.probes import Probes

PAGE = 16
DECODER, VICTIM = 0, 1
"""Slots."""
DECODER_PAGES, VICTIM_PAGES = list(range(4)), list(range(8, 32))
PROMPTS = {DECODER: list(range(100, 120)), VICTIM: list(range(200, 500))}
PREFILL_HOLD_MS, DECODE_HOLD_MS = 600, 150
GUARD_S = 30.0


class Aborted(BaseException):
    """Where the worker's process would have ended."""


class Card:
    """A device opened once, for many runners in turn; `kv` is its cache, [layers, pages, 2, page, heads, D]."""

    def __init__(self, device: Device, config: WorkerConfig, kv: Any, probes: Probes, cuda: Any) -> None:
        self.device = device
        self.config = config
        self.kv = kv
        self.probes = probes
        self.cuda = cuda

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        with self.cuda.stream(self.cuda.ExternalStream(int(self.device.streams[lane].stream))):
            yield

    @property
    def prefill_buffers(self) -> list[Any]:
        """What a prefill forward writes besides KV."""
        work = self.device.compute._works[1]  # type: ignore[attr-defined]
        return [work.residual, work.states, *work.picked]


class Scene:
    """One runner on the card. `held` lanes are delayed from now on, until the delays end by themselves."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.table = FaultyTable(card.device.driver.table)
        self.compute = FaultyCompute(card.device.compute)
        self.aborts: list[str] = []
        self.closed: list[bool] = []
        """For each time that memory was to be freed: whether the held prefill was done."""
        self._prefill_done: Any = None
        self.compute.instead_of_close = self._closing
        device = replace(card.device, compute=self.compute, driver=Driver(self.table, Unbounded()))
        card.cuda.synchronize()
        card.kv.zero_()
        card.cuda.synchronize()
        self.runner: Runner = build_runner(device, card.config, self.abort, time.monotonic)
        self._step = 0

    def _closing(self) -> None:
        self.closed.append(not self.held)

    def abort(self, what: str, error: BaseException | None = None) -> Any:
        self.aborts.append(f"{what}: {error}")
        raise Aborted(self.aborts[-1])

    # ------------------------------ the scenario

    def plan(self, *, starts: list[int], decode: list[int], chunks: list[int], lane: bool = False) -> StepPlan:
        """Rows that start, rows that decode, rows whose whole prompt is computed."""
        self._step += 1
        pages = {DECODER: DECODER_PAGES, VICTIM: VICTIM_PAGES}
        rows = [
            RowStart(
                slot, len(PROMPTS[slot]), packed(PROMPTS[slot]), 0, packed(pages[slot]), RowSampling(temperature=0.0)
            )
            for slot in starts
        ]
        whole = [PrefillChunk(slot, 0, len(PROMPTS[slot]), True) for slot in chunks]
        return StepPlan(self._step, rows, b"", b"", packed(decode), whole, lane)

    def begin(self) -> list[int]:
        """Row 0 computes its prompt and decodes once; its tokens."""
        first = self.run(self.plan(starts=[DECODER], decode=[], chunks=[DECODER]))
        second = self.run(self.plan(starts=[], decode=[DECODER], chunks=[]))
        return [*unpacked(first.prefills[0].tokens), *unpacked(second.tokens)]

    def hold(self, lane: Lane, milliseconds: int) -> None:
        """Delay all later forwards of the lane, each behind a kernel of that length."""

        def held(batch: Batch) -> None:
            with self.card.on(lane):
                self.card.probes.hold(milliseconds)

        self.compute.before[lane] = held

    def launch_victim(self) -> StepResult:
        """Row 1's prompt goes on the prefill lane and stays there for a while; the decode step beside it comes back."""
        self.hold(Lane.PREFILL, PREFILL_HOLD_MS)
        self.runner.launch(self.plan(starts=[VICTIM], decode=[DECODER], chunks=[VICTIM], lane=True))
        driver = self.card.device.driver
        self._prefill_done = driver.call("event_create", EVENT_FLAGS)
        record(driver, self.card.device.streams[Lane.PREFILL], self._prefill_done)
        return self.result()

    @property
    def held(self) -> bool:
        """Whether row 1's prefill is still on its lane."""
        return self._prefill_done is not None and not self.card.device.driver.event_done(self._prefill_done)

    def end(self) -> None:
        """All work is over; the runner is left as it is."""
        self.card.cuda.synchronize()
        if self._prefill_done is not None:
            self.card.device.driver.call("event_destroy", self._prefill_done)

    def decode(self) -> StepPlan:
        return self.plan(starts=[], decode=[DECODER], chunks=[])

    def run(self, plan: StepPlan) -> StepResult:
        self.runner.launch(plan)
        return self.result()

    def result(self) -> StepResult:
        """The next one, polled for."""
        deadline = time.monotonic() + GUARD_S
        while time.monotonic() < deadline:
            for result in self.runner.collect():
                return result
            time.sleep(0.001)
        raise AssertionError(f"no result within {GUARD_S} s")

    def join_victim(self) -> list[int]:
        """Row 1's first token, once its prompt is complete."""
        deadline = time.monotonic() + GUARD_S
        while time.monotonic() < deadline:
            result = self.run(self.plan(starts=[], decode=[], chunks=[]))
            if result.prefills:
                assert result.prefills[0].error is None, result.prefills[0].error
                return unpacked(result.prefills[0].tokens)
        raise AssertionError("the prefill never joined")

    def worker(self, send: Callable[[object], None]) -> Worker:
        """A worker around the runner, whose replies go to `send`; plans come from `plans`."""
        self.plans: list[StepPlan] = []
        channel: Any = _Channel(self.plans, send)
        return Worker(channel, self.runner, Unbounded(), self.abort, wait_timeout=60.0)

    # ------------------------------ the canary

    def poison(self, pages: list[int], buffers: list[Any]) -> None:
        """Fill released memory with NaN, ordered behind nothing."""
        self._poisoned = [*(self.card.kv[:, page] for page in pages), *buffers]
        stream = self.card.cuda.Stream()
        with self.card.cuda.stream(stream):
            for memory in self._poisoned:
                memory.fill_(float("nan"))
        stream.synchronize()

    def canary_survived(self) -> bool:
        """Whether nothing wrote to poisoned memory up to the end of all work."""
        self.card.cuda.synchronize()
        return all(bool(memory.isnan().all()) for memory in self._poisoned)


class _Channel:
    """Frames without a socket."""

    def __init__(self, plans: list[StepPlan], send: Callable[[object], None]) -> None:
        self._plans = plans
        self.send = send

    def receive(self) -> Plan | None:
        return Plan(self._plans.pop(0)) if self._plans else None


def packed(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def unpacked(data: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(data, "<i4")]
