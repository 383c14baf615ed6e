"""The runner on the fake device: order, joins, ownership, and what a failure leaves behind."""

from __future__ import annotations

import pytest

from engine_core.device.base import Batch
from engine_core.device.driver import Status
from engine_core.device.fake_driver import RaceDetected
from engine_core.device.guard import Ownership
from engine_core.errors import ProtocolViolation
from engine_core.step import Lane, PrefillChunk, RowStart, StepResult
from tests.device.rig import Aborted, RunnerRig, Script, ints, plan, row


def prefill_then_decode(rig: RunnerRig, ids: list[int], steps: int) -> list[int]:
    """One row alone: its prompt in one chunk, then `steps` decode steps; the tokens drawn."""
    drawn = rig.run(plan(1, starts=[row(0, ids, list(range(8)))], chunks=[PrefillChunk(0, 0, len(ids), True)]))
    for step in range(2, steps + 2):
        drawn += rig.run(plan(step, decode=[0]))
    return [token for tokens in drawn for token in tokens]


IDS = [5, 6, 7, 8, 9, 10]


def test_chunks_and_batches_give_the_tokens_of_a_row_alone() -> None:
    """Red when a chunk boundary, a batch neighbour or the page order changes what a row sees."""
    alone = prefill_then_decode(RunnerRig(), IDS, 5)
    rig = RunnerRig()
    drawn = rig.run(
        plan(1, starts=[row(2, IDS, [9, 3, 17]), row(1, [1, 2], [4])], chunks=[PrefillChunk(2, 0, 4, False)]),
        plan(2, chunks=[PrefillChunk(2, 4, 2, True), PrefillChunk(1, 0, 2, True)]),
        plan(3, decode=[1, 2]),
        plan(4, decode=[2, 1]),
        plan(5, decode=[2]),
        plan(6, decode=[2, 1], pages={1: 30}),
        plan(7, decode=[2]),
    )
    assert [drawn[1][0], drawn[2][1], drawn[3][0], drawn[4][0], drawn[5][0], drawn[6][0]] == alone


def test_the_served_fake_device_draws_what_the_simulated_one_draws() -> None:
    """Red when a row's window into its page table is off by a page: tokens would come from other KV."""
    for length in (1, 3, 4, 5, 8, 9):
        ids = list(range(20, 20 + length))
        served = prefill_then_decode(RunnerRig(whole_context=False), ids, 12)
        assert served == prefill_then_decode(RunnerRig(), ids, 12)


def test_l6_decode_goes_on_while_a_prefill_is_in_flight() -> None:
    """L6, O8: red when a decode step waits for the prefill, or the prefill samples before it is complete."""
    script = Script(eager=False)
    rig = RunnerRig(script)
    alone = prefill_then_decode(RunnerRig(), IDS, 3)
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.table.run_all()
    rig.runner.collect()
    rig.runner.launch(
        plan(2, starts=[row(1, IDS, [1, 2, 3])], decode=[0], chunks=[PrefillChunk(1, 0, 6, True)], lane=True)
    )
    rig.table.run(rig.streams[Lane.PRIMARY], 99)
    rig.now = 0.25
    (result,) = rig.runner.collect()
    assert (len(ints(result.tokens)), result.prefills, result.prefill_complete) == (1, [], 0)
    rig.runner.launch(plan(3, decode=[0], pages={0: 20}))
    rig.table.run_all()
    (result,) = rig.runner.collect()
    assert result.prefills == []
    rig.now = 0.5
    rig.runner.launch(plan(4))
    rig.now = 0.75
    rig.table.run_all()
    (result,) = rig.runner.collect()
    assert [(p.step, ints(p.tokens), p.busy_us) for p in result.prefills] == [(2, alone[:1], 500_000)]
    assert result.prefill_complete == 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_s2_results_stay_until_their_reply(depth: int) -> None:
    """S2: red when there are no more result slots than steps in flight: a step overwrites what a reply still reads."""
    alone = prefill_then_decode(RunnerRig(), IDS, depth + 1)
    script = Script()
    rig = RunnerRig(script, depth=depth)
    drawn = prefill_then_decode(rig, IDS, 0)
    script.eager = False
    for step in range(2, depth + 3):
        rig.runner.launch(plan(step, decode=[0], pages={0: 20} if step == 2 else None))
    rig.table.run_all()
    drawn += [token for result in rig.runner.collect() for token in ints(result.tokens)]
    assert drawn == alone


def test_e7_an_empty_plan_is_answered_when_the_prefill_completes() -> None:
    """E7: red when idle with a prefill in flight counts as idle, or is answered before its completion."""
    rig = RunnerRig(Script(eager=False))
    rig.runner.launch(plan(1, starts=[row(1, IDS, [1, 2])], chunks=[PrefillChunk(1, 0, 6, True)], lane=True))
    rig.table.run(rig.streams[Lane.PRIMARY], 99)
    assert [result.prefills for result in rig.runner.collect()] == [[]]
    rig.runner.launch(plan(2))
    assert rig.runner.collect() == []
    awaited = rig.runner.awaited()
    assert awaited is not None
    assert awaited.lane is Lane.PREFILL
    rig.table.run_all()
    assert rig.runner.collect() == []  # joined: its token is being drawn on the primary lane
    rig.table.run_all()
    (result,) = rig.runner.collect()
    assert len(ints(result.prefills[0].tokens)) == 1


def test_o8_a_batch_that_joins_travels_with_the_step_before() -> None:
    """O8: red when first tokens wait for a decode step that is launched behind their draw, or when the earlier step's
    result leaves before they are drawn."""
    alone = prefill_then_decode(RunnerRig(), IDS, 0)
    rig = RunnerRig(Script(eager=False))
    primary, prefill = rig.streams[Lane.PRIMARY], rig.streams[Lane.PREFILL]
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.table.run_all()
    rig.runner.collect()
    rig.runner.launch(
        plan(2, starts=[row(1, IDS, [1, 2, 3])], decode=[0], chunks=[PrefillChunk(1, 0, 6, True)], lane=True)
    )
    rig.table.run(primary, 99)
    rig.runner.collect()
    rig.runner.launch(plan(3, decode=[0], pages={0: 20}))
    rig.table.run(prefill, 99)
    rig.runner.launch(plan(4, decode=[0]))
    first = rig.runner.awaited()
    results: list[StepResult] = []
    while not results:
        rig.table.run(primary, 1)
        results = rig.runner.collect()
    assert [(result.step, [p.step for p in result.prefills]) for result in results] == [(3, [2])]
    assert ints(results[0].prefills[0].tokens) == alone
    assert results[0].prefill_complete == 2
    assert first is not None
    assert not rig.runner.collect(), "step 4 was launched behind the draw, and isn't complete"
    rig.table.run_all()
    (last,) = rig.runner.collect()
    assert (last.step, last.prefills) == (4, [])


@pytest.fixture
def decoding() -> RunnerRig:
    """Row 0's next step is on the primary lane's stream, which stands still."""
    rig = RunnerRig(Script(eager=False))
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0, 20])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.table.run_all()
    rig.runner.collect()
    rig.runner.launch(plan(2, decode=[0]))
    return rig


def first_tokens(rig: RunnerRig, step: int) -> list[int]:
    """Run everything, and what the prefill in flight drew, which joins with this step."""
    rig.table.run_all()
    rig.runner.collect()
    rig.runner.launch(plan(step))
    rig.table.run_all()
    return [token for result in rig.runner.collect() for prefill in result.prefills for token in ints(prefill.tokens)]


def test_o1_a_prefill_waits_for_no_decode_step(decoding: RunnerRig) -> None:
    """O1: red when the prefill lane is ordered behind a decode step in flight, or (RaceDetected) when its rows' tables
    are written on the primary lane, where nothing orders them ahead of the batch."""
    rig, primary, prefill = decoding, decoding.streams[Lane.PRIMARY], decoding.streams[Lane.PREFILL]
    starts = [row(1, IDS, [1, 2])]
    rig.runner.launch(plan(3, starts=starts, decode=[0], chunks=[PrefillChunk(1, 0, 6, True)], lane=True))
    waiting = len(primary.queue)
    rig.table.run(prefill, 99)
    assert not prefill.queue
    assert len(primary.queue) == waiting > 0
    assert first_tokens(rig, 4) == prefill_then_decode(RunnerRig(), IDS, 0)
    assert rig.aborts == []


def test_o1_a_prefill_waits_for_the_chunks_before_its_own(decoding: RunnerRig) -> None:
    """O1: red (RaceDetected) when the prefill lane isn't ordered behind a step with chunks: the batch reads what the
    primary lane may still be writing."""
    rig = decoding
    rig.runner.launch(plan(3, starts=[row(1, IDS, [1, 2])], decode=[0], chunks=[PrefillChunk(1, 0, 3, False)]))
    rig.runner.launch(plan(4, decode=[0], chunks=[PrefillChunk(1, 3, 3, True)], lane=True))
    rig.table.run(rig.streams[Lane.PREFILL], 99)
    assert rig.streams[Lane.PREFILL].queue
    assert first_tokens(rig, 5) == prefill_then_decode(RunnerRig(), IDS, 0)
    assert rig.aborts == []


def test_o1_a_prefill_waits_for_tables_that_the_primary_lane_writes(decoding: RunnerRig) -> None:
    """O1: red (RaceDetected) when only steps with chunks count as what a batch builds on, not those that start rows."""
    rig = decoding
    rig.runner.launch(plan(3, starts=[row(1, IDS, [1, 2])], decode=[0]))
    rig.runner.launch(plan(4, decode=[0], chunks=[PrefillChunk(1, 0, 6, True)], lane=True))
    assert first_tokens(rig, 5) == prefill_then_decode(RunnerRig(), IDS, 0)
    assert rig.aborts == []


def test_o12_pages_of_a_row_that_has_left_don_t_come_behind_the_next_one_s_tables(decoding: RunnerRig) -> None:
    """O12: red (RaceDetected) when pages that no step has taken along are appended to the next row in their slot."""
    rig = decoding
    rig.runner.launch(plan(3, starts=[row(1, [3, 4], [4])], chunks=[PrefillChunk(1, 0, 2, True)]))
    rig.runner.launch(plan(4, pages={1: 5}))
    rig.table.run_all()
    rig.runner.collect()
    starts, chunks = [row(1, IDS, [1, 2])], [PrefillChunk(1, 0, 6, True)]
    rig.runner.launch(plan(5, starts=starts, decode=[0], chunks=chunks, lane=True))
    assert first_tokens(rig, 6) == prefill_then_decode(RunnerRig(), IDS, 0)
    assert rig.aborts == []


def test_o1_chunks_without_a_completion_are_behind_the_prefill_s_start(
    decoding: RunnerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O1, E5: red when a step with chunks that failed leaves the prefill lane unordered with the kernels it had
    enqueued, or can't be passed because it has no completion."""
    rig = decoding

    def fail(batch: Batch, ring: int) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(rig.compute, "sample", fail)
        rig.runner.launch(plan(3, starts=[row(1, IDS, [1, 2])], decode=[0], chunks=[PrefillChunk(1, 0, 3, False)]))
    rig.runner.launch(plan(4, starts=[row(2, IDS, [1, 2])], chunks=[PrefillChunk(2, 0, 6, True)], lane=True))
    rig.table.run(rig.streams[Lane.PREFILL], 99)
    assert not rig.streams[Lane.PREFILL].queue
    assert first_tokens(rig, 5) == prefill_then_decode(RunnerRig(), IDS, 0)
    assert rig.aborts == []


def test_o4_a_row_that_can_t_start_fails_with_its_batch(decoding: RunnerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """O1, O4: red when the error leaves while a lane runs, or harms the row that decodes beside."""
    rig = decoding
    start_row = rig.compute.start_row

    def fail(start: RowStart, batch: Batch) -> None:
        start_row(start, batch)
        raise MemoryError("no room")

    monkeypatch.setattr(rig.compute, "start_row", fail)
    starts, chunks = [row(1, IDS, [1, 2])], [PrefillChunk(1, 0, 6, True)]
    rig.runner.launch(plan(3, starts=starts, decode=[0], chunks=chunks, lane=True))
    assert not any(stream.queue for stream in rig.table.streams)
    rig.runner.launch(plan(4, decode=[0]))
    rig.table.run_all()
    results = rig.runner.collect()
    assert [(len(ints(result.tokens)), result.error) for result in results] == [(1, None)] * 3
    errors = [prefill.error for result in results for prefill in result.prefills]
    assert errors == ["the prefill of step 3 failed: MemoryError: no room"]


def test_a_page_given_away_too_early_is_detected() -> None:
    """Red when the vector clocks stop watching: a page that an unfinished prefill reads is written by decode."""
    rig = RunnerRig(Script(eager=False))
    rig.runner.launch(plan(1, starts=[row(0, [1, 2, 3], [0])], chunks=[PrefillChunk(0, 0, 3, True)]))
    rig.runner.launch(plan(2, starts=[row(1, IDS, [1, 2])], chunks=[PrefillChunk(1, 0, 6, True)], lane=True))
    with pytest.raises(Aborted):
        rig.runner.launch(plan(3, starts=[row(2, [7], [2])], decode=[0], chunks=[PrefillChunk(2, 0, 1, True)]))
    assert "RaceDetected" in rig.aborts[0] or "unordered" in rig.aborts[0]


def test_o4_a_decode_failure_leaves_with_the_prefill_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """O4: red when the error result goes out while the prefill lane is unproven."""
    rig = RunnerRig(Script(eager=False))
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.table.run_all()
    rig.runner.collect()
    rig.runner.launch(
        plan(2, starts=[row(1, IDS, [1, 2])], decode=[0], chunks=[PrefillChunk(1, 0, 6, True)], lane=True)
    )

    def fail(*args: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(rig.compute, "sample", fail)
    rig.runner.launch(plan(3, decode=[0]))
    assert rig.lanes.proven(Lane.PREFILL) == 2
    results = rig.runner.collect()
    assert [result.error for result in results] == [None, "step 3 failed: MemoryError: no room"]


@pytest.mark.parametrize("lane", [False, True])
def test_o1_kernels_of_a_forward_that_raises_are_waited_for(lane: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """O1, O2: red when a lane counts as having work only after the forward has returned: nobody would wait for it."""
    rig = RunnerRig(Script(eager=False))
    forward = rig.compute.forward

    def enqueue_and_fail(batch: Batch, ring: int) -> None:
        forward(batch, ring)
        raise RuntimeError("after the last kernel")

    monkeypatch.setattr(rig.compute, "forward", enqueue_and_fail)
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0])], chunks=[PrefillChunk(0, 0, 2, True)], lane=lane))
    assert not any(stream.queue for stream in rig.table.streams)
    rig.runner.launch(plan(2))
    errors = [result.error for result in rig.runner.collect()]
    assert errors == [None, None] if lane else ["step 1 failed: RuntimeError: after the last kernel", None]


def test_o1_a_prefill_that_is_not_launched_yet_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """O1, O12: red when the synchronization after a failed decode launch counts for the prefill launched behind it.

    The core would give away pages under it, and a failure of that prefill would not wait for its kernels.
    """
    rig = RunnerRig(Script(eager=False))
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.table.run_all()
    rig.runner.collect()
    forward = rig.compute.forward

    def fail_decode(batch: Batch, ring: int) -> None:
        if batch.lane is Lane.PRIMARY:
            raise MemoryError("no room")
        forward(batch, ring)

    monkeypatch.setattr(rig.compute, "forward", fail_decode)
    rig.runner.launch(
        plan(2, starts=[row(1, IDS, [1, 2])], decode=[0], chunks=[PrefillChunk(1, 0, 6, True)], lane=True)
    )
    (result,) = rig.runner.collect()
    assert result.error == "step 2 failed: MemoryError: no room"
    assert (result.prefill_complete, rig.lanes.proven(Lane.PREFILL)) == (0, 0)
    rig.runner.quiesce()
    assert rig.lanes.proven(Lane.PREFILL) == 2


def test_e5_a_step_whose_event_fails_is_reported_after_its_work_ended() -> None:
    """E5: red when an event set-up failure aborts although the lane could be synchronized, or is reported before."""
    rig = RunnerRig()
    rig.script.faults["event_create"] = (Status.OUT_OF_MEMORY, False)
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.script.faults.clear()
    (result,) = rig.runner.collect()
    assert result.error is not None
    assert "event_create returned OUT_OF_MEMORY" in result.error
    assert rig.lanes.proven(Lane.PRIMARY) == 1


def test_events_are_destroyed() -> None:
    """Red when the event of a step or of a prefill outlives the results."""
    rig = RunnerRig()
    rig.run(plan(1, starts=[row(0, [1, 2], [0, 1, 2, 3])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.run(plan(2, starts=[row(1, IDS, [4, 5])], decode=[0], chunks=[PrefillChunk(1, 0, 6, True)], lane=True))
    for step in range(3, 12):
        rig.run(plan(step, decode=[0]))
    assert rig.table.live_events == 0


def test_o13_close_proves_the_lanes_idle_first() -> None:
    """O13: red when `close` frees with a prefill in flight."""
    rig = RunnerRig(Script(eager=False))
    rig.runner.launch(plan(1, starts=[row(1, IDS, [1, 2])], chunks=[PrefillChunk(1, 0, 6, True)], lane=True))
    rig.runner.close()
    assert rig.lanes.proven(Lane.PREFILL) == 1


def test_broken_plans_are_protocol_violations() -> None:
    """Red when a plan that can't be right is executed."""
    start = row(0, [1, 2, 3], [0])
    chunk = PrefillChunk(0, 0, 3, True)
    broken = [
        plan(2, starts=[start], chunks=[chunk]),
        plan(1, decode=[0]),
        plan(1, starts=[row(0, [1], [99])]),
        plan(1, starts=[row(9, [1], [0])]),
        plan(1, starts=[row(0, [4000], [0])]),
        plan(1, starts=[start], chunks=[PrefillChunk(0, 1, 2, True)]),
        plan(1, starts=[start], chunks=[PrefillChunk(0, 0, 2, True)]),
        plan(1, starts=[start], chunks=[PrefillChunk(0, 0, 4, True)]),
        plan(1, starts=[row(0, [1, 2, 3, 4, 5], [0])], chunks=[PrefillChunk(0, 0, 5, True)]),
        plan(1, starts=[start], chunks=[chunk], decode=[0]),
        plan(1, starts=[start], pages={3: 1}),
        plan(1, starts=[start], pages={0: -1}),
    ]
    for step in broken:
        with pytest.raises(ProtocolViolation):
            RunnerRig().runner.launch(step)
    with pytest.raises(ProtocolViolation):
        RunnerRig(overlap=False).runner.launch(plan(1, starts=[start], chunks=[chunk], lane=True))


def test_depth_is_bounded() -> None:
    """Red when more plans than async_depth + 1 are taken: ring slots would be reused before they were read."""
    rig = RunnerRig(Script(eager=False), depth=1)
    rig.runner.launch(plan(1, starts=[row(0, [1, 2], [0, 1])], chunks=[PrefillChunk(0, 0, 2, True)]))
    rig.runner.launch(plan(2, decode=[0]))
    with pytest.raises(ProtocolViolation):
        rig.runner.launch(plan(3, decode=[0]))


def test_race_detected_is_fatal() -> None:
    """Red when a detected race is treated as a failed step that others survive."""
    assert RunnerRig().compute.is_fatal(RaceDetected("page 1"))
    assert not RunnerRig().compute.is_fatal(MemoryError())
    assert Ownership.FAILED.value == "failed"
