"""Staged inputs on the card: the ring under a held stream (S4), on against off (S8), no hidden waits (S10).

The held stream makes copies late on purpose: what a missing wait would break, breaks here every time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from engine_core.config import WorkerConfig
from engine_core.device.driver import Driver
from engine_core.device.fail_stop import Unbounded
from engine_core.device.lanes import LaneStream
from engine_core.step import Lane, PrefillChunk, RowSampling, RowStart, StepPlan, StepResult
from engine_core.worker.runner import Runner
from engine_core.worker.worker import build_runner
from scripts.gpu_parity import worker_config
from scripts.serving import TINY
from tests.gpu.card import GUARD_S, packed, unpacked
from tests.gpu.conftest import Measured
from tests.gpu.probes import Probes

pytestmark = pytest.mark.gpu

HOLD_MS = 100
RUNS = 50
ROWS, TOKENS = 256, 8192
"""Sizes of a 4B server's staging."""
PAGE = 16


# ------------------------------ S4: the ring


class Ring:
    """A staging ring, a graph over it, and three steps behind a kernel that holds the stream."""

    def __init__(self, cuda: Any, probes: Probes, make: Callable[..., Any]) -> None:
        import torch

        from engine_core.device.cuda.driver import CudaTable

        self._torch, self._cuda, self._probes = torch, cuda, probes
        self.stream = cuda.Stream()
        self.driver = Driver(CudaTable(0), Unbounded())
        target, device = LaneStream(self.stream.cuda_stream), torch.device("cuda", 0)
        self.staging = make(self.driver, target, ROWS, TOKENS, device)
        self.result = torch.zeros(TOKENS, dtype=torch.int32, device=device)
        self.outputs = [torch.zeros_like(self.result) for _ in range(3)]
        self.graph = cuda.CUDAGraph()
        self._work()
        cuda.synchronize()
        with cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self._work()

    def _work(self) -> None:
        self._torch.add(self.staging.on_device["ids"] * 3, 1, out=self.result)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The stream does nothing for HOLD_MS; then it is waited for."""
        self._cuda.synchronize()
        with self._cuda.stream(self.stream):
            self._probes.hold(HOLD_MS)
            yield
        self.stream.synchronize()

    def step(self, place: int, value: int) -> dict[str, Any]:
        """Stage, replay, keep the output; the pinned fields that were used."""
        fields: dict[str, Any] = self.staging.begin()
        fields["ids"][:] = value
        self.staging.replay(self.graph.replay, tokens=True)
        self.outputs[place].copy_(self.result)
        return fields

    def seen(self) -> list[int | None]:
        """The input that each output came from; None where it came from several."""
        inputs = [(output.cpu().numpy() - 1) // 3 for output in self.outputs]
        return [int(each[0]) if (each == each[0]).all() else None for each in inputs]


def three_steps(ring: Ring, base: int) -> list[int | None]:
    with ring.held():
        for place in range(3):
            if place == 2:
                assert not ring.driver.event_done(ring.staging._events[0]), "vacuous: nothing holds the first copy up"
            ring.step(place, base + place)
    return ring.seen()


def test_s4_the_third_refresh_waits_for_the_first_copy(cuda: Any, probes: Probes, measured: Measured) -> None:
    """Red without the wait: see the next test."""
    from engine_core.device.cuda.staging import Staging

    ring = Ring(cuda, probes, Staging)
    for run in range(RUNS):
        base = 1000 * (run + 1)
        assert three_steps(ring, base) == [base, base + 1, base + 2]
    assert ring.staging.waits == RUNS
    measured("runs", RUNS)


def test_s4_without_the_wait_the_first_step_reads_the_third_ones_inputs(
    cuda: Any, probes: Probes, measured: Measured
) -> None:
    """The mutant "wait removed": wrong in every run, or the test above proves nothing."""
    from engine_core.device.cuda.staging import Staging

    class Unwaiting(Staging):
        def _await(self, slot: int) -> None:
            pass

    ring = Ring(cuda, probes, Unwaiting)
    wrong = 0
    for run in range(RUNS):
        base = 1000 * (run + 1)
        wrong += three_steps(ring, base)[0] == base + 2
    measured("wrong_runs", wrong)
    assert wrong == RUNS


def test_s4_a_scribble_behind_the_enqueue_shows(cuda: Any, probes: Probes) -> None:
    """Control: pinned memory is read when the stream gets there, at real sizes."""
    from engine_core.device.cuda.staging import Staging

    ring = Ring(cuda, probes, Staging)
    with ring.held():
        ring.step(0, 5)["ids"][:] = 77
    assert ring.seen()[0] == 77


def test_s4_pageable_memory_would_hide_it(cuda: Any, probes: Probes, measured: Measured) -> None:
    """Control: from pageable memory the enqueue itself takes the copy; hence pinned memory, and hence the events."""
    from engine_core.device.cuda.staging import Staging

    ring = Ring(cuda, probes, Staging)
    staging = ring.staging
    pageable = [buffer.clone() for buffer in staging._pinned]
    offset = staging._bytes - 3 * 4 * TOKENS
    with ring.held():
        pageable[0][offset : offset + 4 * TOKENS].numpy().view(np.int32)[:] = 5
        staging._pinned = pageable
        began = time.perf_counter()
        staging.replay(ring.graph.replay, tokens=True)
        measured("enqueue_ms", round(1e3 * (time.perf_counter() - began), 1))
        pageable[0][offset : offset + 4 * TOKENS].numpy().view(np.int32)[:] = 77
        ring.outputs[0].copy_(ring.result)
    assert ring.seen()[0] == 5


# ------------------------------ a serving device


class Player:
    """Feeds recorded plans to a runner over a device of its own, as deep as it allows."""

    def __init__(self, cuda: Any, config: WorkerConfig) -> None:
        from engine_core.device.cuda import opening

        self._cuda = cuda
        self.config = config
        self.device = opening.open_device(config, Unbounded(), lambda what, done, total: None)
        self.staging = self.device.compute._works[0].staging  # type: ignore[attr-defined]

    def runner(self) -> Runner:
        return build_runner(self.device, self.config, _abort, time.monotonic)

    def play(self, plans: list[StepPlan], before: Callable[[int], None] = lambda step: None) -> list[list[int]]:
        """Every step's tokens, chunks' behind decode rows'."""
        self._cuda.set_stream(self.device.compute._works[0].stream)  # type: ignore[attr-defined]
        runner, results = self.runner(), list[StepResult]()
        for launched, plan in enumerate(plans):
            while launched - len(results) >= self.config.async_depth:
                results += _collect(runner)
            before(plan.step)
            runner.launch(plan)
        while len(results) < len(plans):
            results += _collect(runner)
        assert not [result.error for result in results if result.error], results
        return [
            unpacked(result.tokens) + [id for prefill in result.prefills for id in unpacked(prefill.tokens)]
            for result in results
        ]

    def close(self) -> None:
        """Pinned buffers go before the streams that used them, and torch's current stream isn't one of those."""
        self._cuda.synchronize()
        del self.staging
        self._cuda.set_stream(self._cuda.default_stream())
        self.device.compute.close()


def _abort(what: str, error: BaseException | None = None) -> Any:
    raise AssertionError(f"the worker would have ended: {what}: {error}")


def _collect(runner: Runner) -> list[StepResult]:
    deadline = time.monotonic() + GUARD_S
    while time.monotonic() < deadline:
        results = runner.collect()
        if results:
            return results
        time.sleep(0.0002)
    raise AssertionError(f"no result within {GUARD_S} s")


def recorded(steps: int, rows: int = 4) -> list[StepPlan]:
    """A schedule: rows start one after another, prompts in two chunks beside decode, then all decode."""
    plans: list[StepPlan] = []
    prompt = 40
    pages_each = -(-(prompt + steps + 1) // PAGE)
    decoding: list[int] = []
    chance = np.random.default_rng(11)
    for step in range(1, steps + 1):
        starts, chunks, row = [], [], (step - 1) // 2
        if row < rows and step % 2:
            ids = chance.integers(100, 900, prompt).tolist()
            pages = packed(list(range(row * pages_each, (row + 1) * pages_each)))
            sampling = RowSampling(temperature=1.0, seed=100 + row)
            starts = [RowStart(row, prompt, packed(ids), 0, pages, sampling)]
        if row < rows:
            chunks = [PrefillChunk(row, 0, 24, False) if step % 2 else PrefillChunk(row, 24, prompt - 24, True)]
        plans.append(StepPlan(step, starts, b"", b"", packed(decoding), chunks, False))
        if row < rows and not step % 2:
            decoding = [*decoding, row]
    return plans


def config(**changes: Any) -> WorkerConfig:
    made = worker_config(TINY, "cuda", "off", "auto")
    return msgspec.structs.replace(made, kv_cache_memory=64 << 20, max_num_seqs=8, async_depth=3, **changes)


@pytest.fixture(scope="module")
def staged(cuda: Any) -> Iterator[Player]:
    player = Player(cuda, config())
    yield player
    player.close()


def test_s8_the_same_tokens_on_and_off_and_with_a_ring_of_one(
    cuda: Any, probes: Probes, staged: Player, measured: Measured
) -> None:
    """Red when either reads another step's inputs: one recorded schedule, the same draws."""
    from engine_core.device.cuda import staging as module

    plans = recorded(40)
    wanted = staged.play(plans)
    assert staged.staging.drains == 0
    off = Player(cuda, config(staged_inputs="off"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cast("dict[str, Any]", module.Staging.__init__.__kwdefaults__), "ring", 1)
        one = Player(cuda, config())
    try:
        for _ in range(5):
            assert staged.play(plans) == wanted
            assert off.play(plans) == wanted
            assert one.play(plans, held_at(one, probes, cuda, 18)) == wanted
        assert staged.staging.drains == 0
        assert off.staging.drains >= 5 * len(plans)
        assert one.staging.waits > 0, "vacuous: no refresh met a pending copy"
        measured("refreshes_waited_on", staged.staging.waits)
        measured("refreshes_waited_ring_of_one", one.staging.waits)
        measured("refreshes_drained_off", off.staging.drains)
    finally:
        off.close()
        one.close()


def held_at(player: Player, probes: Probes, cuda: Any, held: int) -> Callable[[int], None]:
    """Before that step the primary lane is held."""

    def before(step: int) -> None:
        if step == held:
            stream = cuda.ExternalStream(int(player.device.streams[Lane.PRIMARY].stream))
            with cuda.stream(stream):
                probes.hold(HOLD_MS)

    return before


def test_s4_serving_three_steps_deep_goes_wrong_without_the_wait(staged: Player, cuda: Any, probes: Probes) -> None:
    """Red when the product's wait could go unnoticed: with it the tokens stand, without it they don't."""
    plans = recorded(24)
    wanted = staged.play(plans)
    before = held_at(staged, probes, cuda, 18)
    waits = staged.staging.waits
    assert staged.play(plans, before) == wanted
    assert staged.staging.waits > waits, "vacuous: no refresh met a pending copy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(staged.staging), "_await", lambda self, slot: None)
        assert staged.play(plans, before) != wanted


def test_s10_steps_synchronize_nowhere(staged: Player) -> None:
    """Red when a step asks torch for something that only a finished GPU can answer."""
    import torch

    plans = recorded(30)
    wanted = staged.play(plans)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert staged.play(plans) == wanted
    finally:
        torch.cuda.set_sync_debug_mode("default")
