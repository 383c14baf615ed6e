"""What goes wrong between launch and reply, on the card, while a prefill is held on its lane: rules O1 to O6 and O13.

Allowed are two outcomes. Either the error comes out, and all work was proven done before: what the failed step
releases is poisoned at that moment and must stay so. Or the worker aborts, and nothing is freed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from engine_core.config import WorkerConfig
from engine_core.device.base import Batch
from engine_core.device.driver import Status
from engine_core.device.fail_stop import Unbounded
from engine_core.device.lanes import Lanes
from engine_core.step import Lane
from engine_core.worker import runner as runner_module
from scripts.gpu_parity import worker_config
from scripts.serving import TINY
from tests.gpu.card import (
    DECODE_HOLD_MS,
    DECODER,
    DECODER_PAGES,
    GUARD_S,
    VICTIM,
    VICTIM_PAGES,
    Aborted,
    Card,
    Scene,
    unpacked,
)
from tests.gpu.probes import Probes

pytestmark = pytest.mark.gpu

KV_BYTES = 256 << 20


@pytest.fixture(scope="module")
def config() -> WorkerConfig:
    made = worker_config(TINY, "cuda", "green", "auto")
    return msgspec.structs.replace(made, kv_cache_memory=KV_BYTES, max_num_seqs=4)


@pytest.fixture(scope="module")
def card(config: WorkerConfig, cuda: Any, probes: Probes) -> Iterator[Card]:
    """The device is opened once; its KV cache is noted on the way."""
    from engine_core.device.cuda import opening

    made: list[Any] = []
    real = opening._kv_cache

    def noted(*args: Any) -> Any:
        made.append(real(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "_kv_cache", noted)
        device = opening.open_device(config, Unbounded(), lambda what, done, total: None)
    yield Card(device, config, made.pop()[1], probes, cuda)
    cuda.synchronize()
    device.compute.close()


@pytest.fixture
def scene(card: Card) -> Iterator[Scene]:
    made = Scene(card)
    yield made
    made.end()


@dataclass(frozen=True)
class Undisturbed:
    decoder: list[int]
    victim: list[int]


@pytest.fixture(scope="module")
def undisturbed(card: Card) -> Undisturbed:
    scene = Scene(card)
    found = run_undisturbed(scene)
    scene.end()
    return found


def run_undisturbed(scene: Scene) -> Undisturbed:
    tokens = scene.begin()
    tokens += unpacked(scene.launch_victim().tokens)
    assert scene.held, "the prefill was over before anything could happen beside it"
    tokens += unpacked(scene.run(scene.decode()).tokens)
    return Undisturbed(tokens, scene.join_victim())


# ------------------------------ what goes wrong in a decode step


def raising(scene: Scene, call: str) -> None:
    """The call's work is enqueued, then it raises."""

    def fail(batch: Batch) -> None:
        assert scene.held, "the prefill was over before the fault"
        raise MemoryError("injected")

    scene.compute.after[call, Lane.PRIMARY] = fail


FAULTS: dict[str, tuple[Callable[[Scene], None], str]] = {
    "decode launch": (lambda scene: raising(scene, "forward"), "MemoryError: injected"),
    "sampling": (lambda scene: raising(scene, "sample"), "MemoryError: injected"),
    "result building": (lambda scene: raising(scene, "read"), "MemoryError: injected"),
    "event create": (
        lambda scene: scene.table.failing.update(event_create=[Status.OUT_OF_MEMORY]),
        "event_create returned OUT_OF_MEMORY",
    ),
    "event record": (
        lambda scene: scene.table.failing.update(event_record=[Status.INVALID_HANDLE]),
        "event_record returned INVALID_HANDLE",
    ),
    "event record and destroy": (
        lambda scene: scene.table.failing.update(
            event_record=[Status.INVALID_HANDLE], event_destroy=[Status.INVALID_CONTEXT]
        ),
        "then event_destroy returned INVALID_CONTEXT",
    ),
}


def prepare(scene: Scene, fault: str) -> str:
    """Row 0 decodes, row 1's prefill is held, and the next decode step will be too, and fail; the error's words."""
    scene.begin()
    scene.launch_victim()
    scene.hold(Lane.PRIMARY, DECODE_HOLD_MS)
    arm, words = FAULTS[fault]
    arm(scene)
    assert scene.held
    return words


@pytest.mark.parametrize("fault", FAULTS)
def test_o4_a_failed_decode_step_leaves_with_all_lanes_proven(
    scene: Scene, undisturbed: Undisturbed, fault: str
) -> None:
    """O1, O2, O4, E4, E5: red when the error comes out while the step's own kernels or the held prefill still run, when
    it aborts although the lanes can be synchronized, or when the prefill's result is lost or changed by it."""
    words = prepare(scene, fault)
    result = scene.run(scene.decode())
    assert result.error is not None
    assert words in result.error
    assert not scene.held
    scene.poison(DECODER_PAGES, [])
    scene.compute.after.clear()
    assert scene.join_victim() == undisturbed.victim
    assert scene.canary_survived()
    assert scene.aborts == []


@pytest.mark.parametrize("fault", FAULTS)
def test_o1_a_failed_decode_step_that_proves_nothing_aborts(scene: Scene, fault: str) -> None:
    """O1, O9: red when a failed synchronization lets the error out, frees memory, or hides the first error."""
    words = prepare(scene, fault)
    scene.table.failing["stream_synchronize"] = [Status.LAUNCH_FAILED]
    with pytest.raises(Aborted) as aborted:
        scene.run(scene.decode())
    assert "stream_synchronize returned LAUNCH_FAILED" in str(aborted.value)
    assert words in str(aborted.value)
    assert scene.closed == []


def test_control_without_synchronization_the_canary_dies(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when these tests would not notice memory that is reused under a running kernel."""
    prepare(scene, "decode launch")
    monkeypatch.setattr(Lanes, "synchronize", lambda lanes: None)
    assert scene.run(scene.decode()).error is not None
    scene.poison(DECODER_PAGES, [])
    assert not scene.canary_survived()


# ------------------------------ what goes wrong in the prefill


def failing_record(scene: Scene) -> None:
    scene.table.failing["green_ctx_record_event"] = [Status.INVALID_HANDLE]


def failing_forward(scene: Scene) -> None:
    def fail(batch: Batch) -> None:
        raise MemoryError("injected")

    scene.compute.after["forward", Lane.PREFILL] = fail


@pytest.mark.parametrize("fail", [failing_record, failing_forward])
def test_o4_a_failed_prefill_leaves_with_its_lane_proven(
    scene: Scene, undisturbed: Undisturbed, fail: Callable[[Scene], None]
) -> None:
    """O2, O4, E5: red when a prefill's error comes out while its kernels run, or when it ends the decoding row."""
    tokens = scene.begin()
    fail(scene)
    result = scene.launch_victim()
    tokens += unpacked(result.tokens)
    scene.poison(VICTIM_PAGES, scene.card.prefill_buffers)
    prefills = [*result.prefills]
    while not prefills:
        prefills += scene.run(scene.decode()).prefills
    assert prefills[0].error is not None
    assert scene.canary_survived()
    assert tokens == undisturbed.decoder[: len(tokens)]
    assert scene.aborts == []


def test_o1_a_prefill_waits_for_no_decode_step(scene: Scene, undisturbed: Undisturbed) -> None:
    """O1: red when a batch is ordered behind the decode step in flight, or when its row's tables, written on its own
    lane, aren't what its forward and its draw read."""
    tokens = scene.begin()
    scene.hold(Lane.PRIMARY, DECODE_HOLD_MS)
    scene.runner.launch(scene.decode())
    scene.runner.launch(scene.plan(starts=[VICTIM], decode=[DECODER], chunks=[VICTIM], lane=True))
    step, prefill = scene.runner.pending()
    driver, deadline = scene.card.device.driver, time.monotonic() + GUARD_S
    while not driver.event_done(prefill.event):
        assert time.monotonic() < deadline
    assert not driver.event_done(step.event), "the prefill was complete behind the decode step only"
    tokens += [*unpacked(scene.result().tokens), *unpacked(scene.result().tokens)]
    assert scene.join_victim() == undisturbed.victim
    assert tokens == undisturbed.decoder
    assert scene.aborts == []


# ------------------------------ reply, aggregation, teardown


def turn(scene: Scene, send: Callable[[object], None]) -> None:
    """A worker takes one decode plan and works until it aborts."""
    worker = scene.worker(send)
    scene.plans.append(scene.decode())
    deadline = time.monotonic() + GUARD_S
    while time.monotonic() < deadline:
        worker.step()
        time.sleep(0.001)


def test_o6_a_lost_reply_aborts(scene: Scene) -> None:
    """O6: red when a reply that can't be sent is forgotten, or memory is freed under the prefill in flight."""

    def lost(body: object) -> None:
        raise OSError("the reply is lost")

    scene.begin()
    scene.launch_victim()
    with pytest.raises(Aborted, match="the reply is lost"):
        turn(scene, lost)
    assert scene.closed == []
    assert scene.held


def test_o6_a_failed_aggregation_aborts(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """O6: red when a result that can't be put together is left out and the worker goes on."""

    def fail(*args: object) -> None:
        raise ValueError("no aggregate")

    scene.begin()
    scene.launch_victim()
    monkeypatch.setattr(runner_module, "split_logprobs", fail)
    with pytest.raises(Aborted, match="no aggregate"):
        turn(scene, lambda body: None)
    assert scene.closed == []


def test_o13_teardown_waits_for_the_prefill_in_flight(scene: Scene) -> None:
    """O13: red when memory is freed before the held prefill is done."""
    scene.begin()
    scene.launch_victim()
    assert scene.held
    scene.runner.close()
    assert scene.closed == [True]


def test_o13_teardown_that_proves_nothing_aborts(scene: Scene) -> None:
    """O13: red when a failed synchronization doesn't keep teardown from freeing."""
    scene.begin()
    scene.launch_victim()
    scene.table.failing["stream_synchronize"] = [Status.LAUNCH_FAILED]
    with pytest.raises(Aborted, match="teardown"):
        scene.runner.close()
    assert scene.closed == []


# ------------------------------ what reused memory holds


def test_s6_what_free_pages_hold_changes_nothing(card: Card, scene: Scene, undisturbed: Undisturbed) -> None:
    """S6: red when a kernel lets positions beyond a row's length, or another row's pages, into a row's result: every
    page and every prefill buffer is full of NaN beforehand."""
    scene.poison(list(range(card.kv.shape[1])), card.prefill_buffers)
    assert run_undisturbed(scene) == undisturbed
