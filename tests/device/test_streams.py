"""Which streams the lanes run on, and what is enqueued on them in which order: rules L2 to L6, E1."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NoReturn

import pytest

from engine_core.device.base import Batch
from engine_core.device.driver import EVENT_FLAGS, STREAM_NON_BLOCKING, Driver
from engine_core.device.fail_stop import Unbounded
from engine_core.device.fake import open_device
from engine_core.device.fake_driver import FakeTable
from engine_core.device.green import AUTO_DECODE_SMS
from engine_core.device.streams import open_streams
from engine_core.errors import ConfigError, ProtocolViolation
from engine_core.step import Lane, PrefillChunk
from engine_core.worker.worker import build_runner
from tests.device.rig import RunnerRig, Script, plan, row
from tests.worker_config import worker_config

IDS = [5, 6, 7, 8, 9, 10]


def test_l3_l4_the_primary_stream_is_one_of_its_own_and_of_the_highest_priority() -> None:
    """L3, L4: red when the primary lane runs on the default stream, synchronizes with it, or loses its priority."""
    for overlap in ("off", "stream", "green"):
        table = FakeTable()
        streams, _ = open_streams(Driver(table, Unbounded()), overlap, 64, ExitStack())
        primary = streams[Lane.PRIMARY]
        assert primary.stream in table.streams
        assert primary.green_ctx is None
        assert (primary.stream.flags, primary.stream.priority) == (STREAM_NON_BLOCKING, -5)
        assert set(streams) == ({Lane.PRIMARY} if overlap == "off" else set(Lane))


def test_l3_a_prefill_that_shares_the_sms_has_the_lowest_priority() -> None:
    """L3: red when a prefill on a second stream competes with decode on equal terms."""
    table = FakeTable()
    streams, partitions = open_streams(Driver(table, Unbounded()), "stream", None, ExitStack())
    assert not partitions
    assert streams[Lane.PREFILL].stream.priority == 0
    assert streams[Lane.PREFILL].stream.flags == STREAM_NON_BLOCKING


def test_l1_green_lanes_keep_their_context_and_give_everything_back() -> None:
    """L1, E2: red when the prefill lane forgets its Green Context, or a context goes before its stream."""
    table = FakeTable()
    with ExitStack() as created:
        streams, (partition,) = open_streams(Driver(table, Unbounded()), "green", 64, created)
        assert streams[Lane.PREFILL].green_ctx is streams[Lane.PREFILL].stream.green_ctx is not None
        assert partition.decode.green_ctx is not streams[Lane.PREFILL].green_ctx
    assert not any(stream.alive for stream in table.streams)
    assert table.calls[-5:-1] == ["stream_destroy", "stream_destroy", "green_ctx_destroy", "green_ctx_destroy"]


def test_l1_auto_has_several_partitions_and_green_one() -> None:
    """L1: red when a partition's streams or contexts stay behind, or one that was asked for brings others along."""
    for overlap, asked, sms in (("auto", None, list(AUTO_DECODE_SMS)), ("auto", 64, [64]), ("green", None, [48])):
        table = FakeTable()
        with ExitStack() as created:
            streams, partitions = open_streams(Driver(table, Unbounded()), overlap, asked, created)
            assert [partition.decode_sms for partition in partitions] == sms
            assert streams[Lane.PREFILL] is partitions[-1].prefill
        assert not any(stream.alive for stream in table.streams)


def unbroken(what: str, error: BaseException | None) -> NoReturn:
    pytest.fail(f"{what}: {error}")


def test_the_fake_device_runs_a_prefill_on_every_partition_of_auto() -> None:
    """Red when the simulated GPU has clocks for fewer streams than `auto` opens: batches of the last partition fail."""
    config = worker_config(decode_overlap="auto", max_num_seqs=len(AUTO_DECODE_SMS))
    device = open_device(config, Unbounded(), lambda what, done, total: None)
    runner = build_runner(device, config, unbroken, lambda: 0.0)
    assert len(device.partitions) == len(AUTO_DECODE_SMS)
    for partition in range(len(device.partitions)):
        step, slot = 2 * partition + 1, partition
        start, chunk = row(slot, IDS, [2 * slot, 2 * slot + 1]), PrefillChunk(slot, 0, len(IDS), True)
        runner.launch(plan(step, starts=[start], chunks=[chunk], lane=True, partition=partition))
        runner.launch(plan(step + 1))
        (prefill,) = [prefill for result in runner.collect() for prefill in result.prefills]
        assert (prefill.step, prefill.error, len(prefill.tokens)) == (step, None, 4)


def test_l1_no_decode_sms_is_refused_like_any_other_impossible_split() -> None:
    """L1: red when 0 counts as unset and becomes the default in silence."""
    with pytest.raises(ConfigError, match="--decode-sms 0: use 8"):
        open_streams(Driver(FakeTable(), Unbounded()), "green", 0, ExitStack())


def decoding(rig: RunnerRig) -> None:
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0, 1, 2])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.table.run_all()
    rig.runner.collect()


def watch_forwards(rig: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Lane, bool]]:
    """(step, lane, beside a prefill) of every forward from now on."""
    seen: list[tuple[int, Lane, bool]] = []
    forward = rig.compute.forward

    def note(batch: Batch, ring: int) -> None:
        seen.append((batch.step, batch.lane, batch.partition is not None))
        forward(batch, ring)

    monkeypatch.setattr(rig.compute, "forward", note)
    return seen


def test_l2_decode_keeps_to_its_partition_for_as_long_as_a_prefill_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L2: red when only the launching step, or a step after the join, runs beside the prefill."""
    rig = RunnerRig(Script(eager=False))
    decoding(rig)
    seen = watch_forwards(rig, monkeypatch)
    chunk = PrefillChunk(1, 0, 6, True)
    rig.runner.launch(plan(2, starts=[row(1, IDS, [4, 5])], decode=[0], chunks=[chunk], lane=True))
    rig.runner.launch(plan(3, decode=[0]))
    rig.table.run_all()
    rig.runner.collect()
    rig.runner.launch(plan(4, decode=[0]))
    beside = {step: flag for step, lane, flag in seen if lane is Lane.PRIMARY}
    assert beside == {2: True, 3: True, 4: False}


def test_l5_a_prefill_is_enqueued_behind_its_step_s_decode_and_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L5: red when decode is enqueued only after the prefill, or a launch blocks or queries an event."""
    rig = RunnerRig(Script(eager=False))
    decoding(rig)
    seen = watch_forwards(rig, monkeypatch)
    before = len(rig.table.calls)
    chunk = PrefillChunk(1, 0, 6, True)
    rig.runner.launch(plan(2, starts=[row(1, IDS, [4, 5])], decode=[0], chunks=[chunk], lane=True))
    assert [(step, lane) for step, lane, _ in seen] == [(2, Lane.PRIMARY), (2, Lane.PREFILL)]
    order = ["event_create", "event_record", "event_create", "green_ctx_record_event"]
    assert rig.table.calls[before:] == order


def test_l6_a_second_prefill_is_refused_while_one_is_in_flight() -> None:
    """L6: red when the worker takes a second batch: the first one's ring slot and completion would be lost."""
    rig = RunnerRig(Script(eager=False))
    decoding(rig)
    chunk = PrefillChunk(1, 0, 6, True)
    rig.runner.launch(plan(2, starts=[row(1, IDS, [4, 5])], decode=[0], chunks=[chunk], lane=True))
    with pytest.raises(ProtocolViolation, match="launches a prefill while that of step 2 is in flight"):
        rig.runner.launch(plan(3, starts=[row(2, [7], [6])], chunks=[PrefillChunk(2, 0, 1, True)], lane=True))


def test_l6_a_prefill_is_refused_until_the_result_of_the_one_before_is_read() -> None:
    """L6: red when a batch counts as done once it has joined: its draw may not have run yet, and at depth 1 the next
    batch but one writes to its ring slot, what was drawn from it unread."""
    rig = RunnerRig(Script(eager=False), depth=1)
    decoding(rig)
    start, chunk = row(1, IDS, [4, 5]), PrefillChunk(1, 0, 6, True)
    rig.runner.launch(plan(2, starts=[start], decode=[0], chunks=[chunk], lane=True))
    rig.table.run_all()
    rig.runner.collect()
    rig.runner.launch(plan(3, decode=[0]))
    start, chunk = row(2, IDS, [6, 7]), PrefillChunk(2, 0, 6, True)
    with pytest.raises(ProtocolViolation, match="launches a prefill while that of step 2 is in flight"):
        rig.runner.launch(plan(4, starts=[start], decode=[0], chunks=[chunk], lane=True))


def test_e1_every_completion_is_created_to_sleep_and_without_timing() -> None:
    """E1: red when a completion's event would spin its waiter, or carries timing."""
    rig = RunnerRig(Script(eager=False))
    decoding(rig)
    chunk = PrefillChunk(1, 0, 6, True)
    rig.runner.launch(plan(2, starts=[row(1, IDS, [4, 5])], decode=[0], chunks=[chunk], lane=True))
    events = [completion.event for completion in rig.runner.pending()]
    assert [event.flags for event in events] == [EVENT_FLAGS, EVENT_FLAGS]
    assert EVENT_FLAGS == 0x1 | 0x2


def test_l2_e2_a_batch_runs_and_is_proven_on_the_partition_that_its_plan_names() -> None:
    """L2, E2: red when a batch goes to another partition's stream, decode beside it keeps to another partition, or its
    completion stands behind another stream's work."""
    rig = RunnerRig(Script(eager=False), partitions=2)
    decoding(rig)
    for step, partition in ((2, 1), (5, 0), (8, 1)):
        slot, before = partition + 1, [target.stream.enqueued for target in rig.prefills]
        start, chunk = row(slot, IDS, [4 + 2 * slot, 5 + 2 * slot]), PrefillChunk(slot, 0, 6, True)
        rig.runner.launch(plan(step, starts=[start], decode=[0], chunks=[chunk], lane=True, partition=partition))
        grown = [target.stream.enqueued > count for target, count in zip(rig.prefills, before, strict=True)]
        assert grown == [partition == 0, partition == 1]
        flight, last = rig.runner._prefill, rig.runner._steps[-1]
        assert flight is not None
        assert flight.completion is not None
        assert flight.completion.event.stream is rig.prefills[partition].stream
        assert last.batch.partition == partition
        rig.runner.launch(plan(step + 1, decode=[0]))
        rig.table.run_all()
        rig.runner.collect()
        rig.runner.launch(plan(step + 2, decode=[0]))
        assert rig.runner._steps[-1].batch.partition is None
        rig.table.run_all()
        assert [p.step for result in rig.runner.collect() for p in result.prefills] == [step]


@pytest.mark.parametrize("partition", [2, -1])
def test_a_partition_that_isn_t_there_is_a_violation(partition: int) -> None:
    """Red when a plan's partition isn't checked before anything is enqueued for it."""
    rig = RunnerRig(Script(eager=False), partitions=2)
    decoding(rig)
    start, chunk = row(1, IDS, [4, 5]), PrefillChunk(1, 0, 6, True)
    with pytest.raises(ProtocolViolation, match=f"asks for partition {partition} of 2"):
        rig.runner.launch(plan(2, starts=[start], chunks=[chunk], lane=True, partition=partition))
