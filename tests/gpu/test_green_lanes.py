"""Green Contexts on the card: partitions are disjoint, graphs keep theirs, and events wait for what they should."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine_core.device.driver import EVENT_FLAGS, STREAM_NON_BLOCKING, Driver
from engine_core.device.fail_stop import Unbounded
from engine_core.device.green import GreenPartition, split
from engine_core.device.lanes import LaneStream, record
from tests.gpu.conftest import Measured
from tests.gpu.probes import Probes

pytestmark = pytest.mark.gpu

DECODE_SMS = 48
HOLD_MS = 300


@pytest.fixture(scope="module")
def driver(cuda: Any) -> Driver:
    from engine_core.device.cuda.driver import CudaTable

    return Driver(CudaTable(0), Unbounded())


@pytest.fixture(scope="module")
def partition(driver: Driver, cuda: Any) -> Iterator[GreenPartition]:
    made = split(driver, DECODE_SMS)
    yield made
    cuda.synchronize()
    made.close()


@pytest.fixture(scope="module")
def plain(driver: Driver, cuda: Any) -> Iterator[LaneStream]:
    """A stream like the primary lane's."""
    stream = driver.call("stream_create", STREAM_NON_BLOCKING, 0)
    yield LaneStream(stream)
    cuda.synchronize()
    driver.call("stream_destroy", stream)


def on(cuda: Any, target: LaneStream) -> Any:
    """A context in which torch launches into the lane's stream."""
    return cuda.stream(cuda.ExternalStream(int(target.stream)))


def sms_of(cuda: Any, probes: Probes, target: LaneStream) -> set[int]:
    """The SMs that work launched into the stream runs on."""
    seen = probes.seen_sms()
    cuda.synchronize()
    with on(cuda, target):
        probes.record_sms(seen)
    cuda.synchronize()
    return set(seen.nonzero().flatten().tolist())


def test_l1_the_partitions_share_no_sm(
    cuda: Any, probes: Probes, partition: GreenPartition, plain: LaneStream, measured: Measured
) -> None:
    """L1: red when `split` gives both lanes the same SMs, or other than it says."""
    decode, prefill = (sms_of(cuda, probes, lane) for lane in (partition.decode, partition.prefill))
    measured("decode_sms", sorted(decode))
    measured("prefill_sms", sorted(prefill))
    assert decode & prefill == set()
    assert (len(decode), len(prefill)) == (partition.decode_sms, partition.prefill_sms)
    assert decode | prefill == sms_of(cuda, probes, plain)


def test_l2_a_graph_keeps_the_partition_it_was_captured_on(
    cuda: Any, probes: Probes, partition: GreenPartition, plain: LaneStream
) -> None:
    """L2: red when a decode graph, replayed from the primary stream, runs on the prefill lane's SMs."""
    seen = probes.seen_sms()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    stream = cuda.ExternalStream(int(partition.decode.stream))
    with cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        probes.record_sms(seen)
    with on(cuda, plain):
        graph.replay()
    cuda.synchronize()
    assert set(seen.nonzero().flatten().tolist()) == sms_of(cuda, probes, partition.decode)


def waits(cuda: Any, driver: Driver, target: LaneStream, event: Any) -> tuple[bool, float]:
    """Whether an event recorded now is pending, and the seconds until it isn't."""
    record(driver, target, event)
    began = time.monotonic()
    pending = not driver.event_done(event)
    driver.event_wait(event)
    return pending, time.monotonic() - began


def test_e2_an_event_waits_for_the_stream_launched_into(
    cuda: Any, driver: Driver, probes: Probes, partition: GreenPartition, plain: LaneStream, measured: Measured
) -> None:
    """E2, the control: a delay captured on a green stream and replayed from a plain one. Red when the record on the
    plain stream doesn't wait for it: then decode's completions would prove nothing."""
    event = driver.call("event_create", EVENT_FLAGS)
    graph = cuda.CUDAGraph()
    stream = cuda.ExternalStream(int(partition.decode.stream))
    with cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        probes.hold(HOLD_MS)
    with on(cuda, plain):
        graph.replay()
    pending, seconds = waits(cuda, driver, plain, event)
    measured("waited_s", round(seconds, 3))
    driver.call("event_destroy", event)
    assert pending
    assert seconds > 0.8 * HOLD_MS / 1e3


def test_e2_a_green_stream_s_event_waits_for_its_work(
    cuda: Any, driver: Driver, probes: Probes, partition: GreenPartition, measured: Measured
) -> None:
    """E2: red when the record through the lane's Green Context doesn't cover what was launched into its stream."""
    event = driver.call("event_create", EVENT_FLAGS)
    with on(cuda, partition.prefill):
        probes.hold(HOLD_MS)
    pending, seconds = waits(cuda, driver, partition.prefill, event)
    measured("waited_s", round(seconds, 3))
    measured("status_of_a_plain_record", driver.table.event_record(event, partition.prefill.stream)[0])
    cuda.synchronize()
    driver.call("event_destroy", event)
    assert pending
    assert seconds > 0.8 * HOLD_MS / 1e3


def test_e2_the_other_partition_is_not_waited_for(
    cuda: Any, driver: Driver, probes: Probes, partition: GreenPartition
) -> None:
    """E2: red when one lane's completion waits for the other lane's work: decode would stand still under a prefill."""
    event = driver.call("event_create", EVENT_FLAGS)
    behind = driver.call("event_create", EVENT_FLAGS)
    with on(cuda, partition.prefill):
        probes.hold(HOLD_MS)
    record(driver, partition.prefill, behind)
    record(driver, partition.decode, event)
    driver.event_wait(event)
    still_held = not driver.event_done(behind)
    cuda.synchronize()
    for each in (event, behind):
        driver.call("event_destroy", each)
    assert still_held
