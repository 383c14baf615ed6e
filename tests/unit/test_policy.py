"""What the lanes' policy chooses, and what it learns: pure functions of the load and of measured times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_core.device.fake import pretended_times
from engine_core.scheduling.policy import LEAST_FACTOR, TARGET_FACTOR, AutoPolicy, Choice, FixedPolicy, Way
from engine_core.scheduling.step_model import Load, Observed, Work
from engine_core.step import MOST_PRIMARY_TOKENS, StepTimes

BUDGET = 4096
TIMES = pretended_times(64)


def auto(itl_ms: float | None = None, times: StepTimes = TIMES, ttft_ms: float | None = None) -> AutoPolicy:
    return AutoPolicy(BUDGET, times, itl_ms, ttft_ms)


def partitioned(decode_us: int | None = None, prefill_us: int | None = None) -> StepTimes:
    """TIMES with other times beside a prefill, or of one of BUDGET tokens."""
    (times,) = TIMES.partitions
    decode = times.decode if decode_us is None else [(rows, decode_us) for rows, _ in times.decode]
    prefill = times.prefill if prefill_us is None else [(BUDGET, prefill_us)]
    return replace(TIMES, partitions=[replace(times, decode=decode, prefill=prefill)])


def load(rows: int = 16, context: int = 0, remaining: int = 4096, history: int = 0) -> Load:
    return Load(rows, context, remaining, min(remaining, 4096), history)


def test_fixed_modes() -> None:
    """Red when `off` takes more than its budget beside decode rows, a lane mode mixes, or either leaves a GPU idle."""
    off, lane = FixedPolicy(2048, lane=False), FixedPolicy(2048, lane=True)
    assert off.choose(load(16)) == Choice(2032, Way.MIXED)
    assert lane.choose(load(16)) == Choice(2048, Way.LANE)
    assert off.choose(load(0)) == lane.choose(load(0)) == Choice(2048, Way.ALONE)


def test_no_decode_row_gets_prefill_everything() -> None:
    """Red when a prompt is cut small though nobody decodes."""
    assert auto(0.1).choose(load(0)) == Choice(MOST_PRIMARY_TOKENS, Way.ALONE)


def test_the_largest_chunk_that_keeps_the_target() -> None:
    """16 rows and a chunk take 3360 + 20 us a token: at a target of 8.9 ms, 8.54 with the margin, and 0.15 for the
    delivery, that is 128 tokens (5.9) and not 256 (8.48). Red when one of these, the table or the search changes.
    Decode beside the lane is too slow here."""
    times = partitioned(decode_us=20_000)
    assert auto(8.9, times).choose(load()) == Choice(128, Way.MIXED)
    assert auto(9.1, times).choose(load()) == Choice(256, Way.MIXED)


def test_without_an_asked_target_there_is_a_margin_too() -> None:
    """16 rows take 3.45 ms alone at a usual context: twice that is 6.89, 6.62 with the margin, 6.47 less the delivery.
    Red without the margin: then a step of 6.6 ms beside the lane would keep the target."""
    assert auto(times=partitioned(decode_us=6_400)).choose(load()).way is Way.LANE
    assert auto(times=partitioned(decode_us=6_600)).choose(load()).way is Way.MIXED


def test_a_chunk_no_larger_than_what_is_left() -> None:
    """Red when a short prompt is padded to the largest chunk that the target would allow."""
    assert auto(100.0).choose(load(remaining=60)) == Choice(64, Way.MIXED)


def test_a_step_has_no_more_tokens_than_it_may() -> None:
    """Red when a chunk fills the budget of a step that holds decode rows, too."""
    policy = AutoPolicy(2048, pretended_times(256), 600_000.0, None)
    assert policy.choose(load(200)) == Choice(1848, Way.MIXED)
    assert AutoPolicy(64, TIMES, None, None).model.sizes(60) == [4]


def test_the_lane_where_it_finishes_sooner_within_the_target() -> None:
    """At 7 ms only 128 tokens a step can be mixed, 32 steps of 5.9 ms; the lane takes 123 ms and decode beside it 4.7.
    Red when the two ways' times are compared wrongly. With a looser target mixing wins: 2048 at 44 ms, twice."""
    assert auto(7.0).choose(load()) == Choice(BUDGET, Way.LANE)
    assert auto(60.0).choose(load()) == Choice(2048, Way.MIXED)


def test_where_nothing_keeps_the_target_prompts_still_get_on() -> None:
    """Red when an unreachable target starves prompts: the way with the shortest decode step is taken."""
    assert auto(0.5).choose(load()) == Choice(32, Way.MIXED)
    slow = replace(TIMES, mixed=[(r, t, 9 * us) for r, t, us in TIMES.mixed])
    assert auto(0.5, slow).choose(load()) == Choice(BUDGET, Way.LANE)


def test_where_prompts_pile_up_chunks_grow() -> None:
    """40960 waiting tokens can't be computed in 400 ms: the fastest way is taken. 13000 take 0.3 s in chunks of 1024
    and 0.35 in chunks of 512, which cost decode nearly as much in all. Red when a backlog is ignored without an ITL
    target, or breaks one that stands alone; or when all wait longer so that single steps be shorter."""
    assert auto().choose(load(remaining=40_960)) == Choice(2048, Way.MIXED)
    assert auto(ttft_ms=400).choose(load(remaining=13_000)) == Choice(1024, Way.MIXED)
    assert auto(4.5).choose(load(remaining=40_960)) == Choice(32, Way.MIXED)


def test_a_lone_long_prompt_is_no_pile() -> None:
    """16384 tokens take 0.5 s on the lane. Red when decode loses its pace to one prompt though nobody said how long it
    may wait, or when one waits for ever in chunks where the lane is too slow for decode."""
    load, more = (Load(16, 0, remaining, 16_384, 0) for remaining in (16_384, 16_385))
    assert auto().choose(load).way is Way.LANE
    for policy in (auto(ttft_ms=400), auto(8.0, ttft_ms=400)):
        assert policy.choose(load).way is Way.MIXED
    assert auto().choose(more).way is Way.MIXED
    assert auto(times=partitioned(decode_us=20_000)).choose(load).tokens > 512


@pytest.mark.parametrize(("decode_us", "way"), [(8500, Way.LANE), (20_000, Way.MIXED)])
def test_where_nothing_keeps_the_target_the_lane_counts_too(decode_us: int, way: Way) -> None:
    """A lone prompt takes 0.13 s on the lane beside steps of 8.5 ms, where 6.4 are aimed at; in chunks of 32 tokens,
    which cost decode less still, it takes 1 s. Red when chunks grow beyond what the lane would cost decode; or when the
    lane is taken though a chunk that is soon enough costs decode less."""
    slow = partitioned(decode_us=decode_us)
    slow = replace(slow, mixed=[(rows, tokens, 2 * us) for rows, tokens, us in slow.mixed])
    assert auto(times=slow).choose(load()).way is way


def test_where_nothing_keeps_the_target_a_lone_prompt_waits_for_the_gentlest_lane() -> None:
    """Red when steps of 9 ms are taken because beside those of 8.6 ms the prompt takes longer than is said of prompts
    that wait together; with others waiting that counts."""
    times = pretended_times(64, 2)
    lanes = [
        replace(lane, decode=[(rows, us) for rows, _ in lane.decode], prefill=[(BUDGET, prefill_us)])
        for lane, us, prefill_us in zip(times.partitions, (9000, 8600), (300_000, 450_000), strict=True)
    ]
    slow = replace(times, partitions=lanes, mixed=[(rows, tokens, 9 * us) for rows, tokens, us in times.mixed])
    assert auto(times=slow).choose(load()) == Choice(BUDGET, Way.LANE, 1)
    assert auto(times=slow, ttft_ms=400).choose(load()) == Choice(BUDGET, Way.LANE, 0)


def test_where_nothing_keeps_the_target_several_prompts_wait_for_the_gentlest_way_too() -> None:
    """Two prompts are done after 0.23 s beside steps of 9 ms, or after 0.33 s beside 8.6. Red when decode, which misses
    its target already, is slowed down further for prompts that don't wait too long."""
    times = pretended_times(64, 2)
    lanes = [
        replace(lane, decode=[(rows, us) for rows, _ in lane.decode], prefill=[(BUDGET, prefill_us)])
        for lane, us, prefill_us in zip(times.partitions, (9000, 8600), (100_000, 150_000), strict=True)
    ]
    slow = replace(times, partitions=lanes, mixed=[(rows, tokens, 9 * us) for rows, tokens, us in times.mixed])
    assert auto(times=slow).choose(load(remaining=2 * BUDGET)) == Choice(BUDGET, Way.LANE, 1)


def test_long_contexts_shrink_the_chunk() -> None:
    """Red when reading the decode rows' KV, or the chunk's own history, isn't counted."""
    model = auto(9.3).model
    assert model.mixed(load(), 256) < model.mixed(load(context=40_000), 256)
    assert model.mixed(load(), 256) < model.mixed(load(history=8192), 256)


def test_without_a_target_it_follows_the_lone_pace() -> None:
    """Red when the default target stops being a multiple of what decode takes alone with so many rows: the same for
    short contexts, and more where contexts are so long that it could no longer be kept."""
    policy = auto()
    for context in (0, 20_000):
        assert policy.target(load(16, context)) == pytest.approx(TARGET_FACTOR * (3160 + 0.035 * 16 * 512))
    assert policy.target(load(64)) == pytest.approx(TARGET_FACTOR * (3640 + 0.035 * 64 * 512))
    assert policy.target(load(16, context=100_000)) == pytest.approx(LEAST_FACTOR * (3160 + 3500))


def test_few_rows_are_held_to_the_pace_of_sixteen() -> None:
    """Red when prompts beside one decode row are slowed down for the sake of twice that row's own pace."""
    assert auto().target(load(1)) == auto().target(load(16))


def test_the_lane_takes_prompts_one_after_another() -> None:
    """Red when all that wait are one batch, so that the first waits for the last; or a long prompt is cut; or short
    ones go one by one."""
    slow = replace(TIMES, mixed=[(r, t, 9 * us) for r, t, us in TIMES.mixed])
    for first, tokens in ((100, 2048), (1500, 2048), (3000, 3000), (8000, BUDGET)):
        waiting = Load(rows=16, context=0, remaining=40_000, first=first, history=0)
        assert auto(7.0, slow).choose(waiting) == Choice(tokens, Way.LANE)


def test_what_a_chunk_size_leaves_is_no_whole_step() -> None:
    """At 8.9 ms 3970 tokens take 31 steps of 128 and one of 2: 187.5 ms. A lane that takes 211 ms with its join isn't
    nearly as soon, as it would be against 32 whole steps (189.4). Red when the last step counts as a full one."""
    times = replace(partitioned(decode_us=5000, prefill_us=201_000), history=[(32, 0.0)])
    assert auto(8.9, times).choose(Load(16, 0, 3970, 3970, 0)).way is Way.MIXED


def test_chunks_that_will_shrink_take_longer() -> None:
    """128 tokens keep 7.7 ms at first, but not behind 3072 others, where only 64 do: in all it takes 318 ms. A lane of
    290 ms is sooner. Red when all chunks count as large as the first (265 ms)."""
    history = [(tokens, 9.0 * tokens) for tokens, _ in TIMES.history]
    times = replace(partitioned(prefill_us=290_000), history=history)
    assert auto(7.7, times).choose(load()).way is Way.LANE


def test_it_learns_from_steps_and_forgets_outliers() -> None:
    """Red when observations don't move predictions, move the wrong kind, or one stall moves them without bound."""
    policy, model = auto(9.0), auto(9.0).model
    policy.model = model
    kinds: dict[Work, Callable[[], float]] = {
        Work.DECODE: lambda: model.decode(load()),
        Work.MIXED: lambda: model.mixed(load(), 128),
        Work.BESIDE: lambda: model.beside(load(), 0),
        Work.BATCH: lambda: model.batch(load(), 128, 0),
    }
    before = {work: predict() for work, predict in kinds.items()}
    for slower, work in enumerate(Work, 1):
        for _ in range(200):
            policy.observe(Observed(work, load(), 128, round((1 + slower / 10) * before[work])))
        for other, predict in kinds.items():
            learned = 1 + list(Work).index(other) / 10 + 0.1 if list(Work).index(other) < slower else 1.0
            assert predict() == pytest.approx(learned * before[other], rel=0.02)
    policy.observe(Observed(Work.DECODE, load(), 0, 10**9))
    assert model.decode(load()) <= 3 * before[Work.DECODE]


def test_a_batch_teaches_more_than_a_step() -> None:
    """Red when a batch that took half as long again as predicted is expected to take little longer the next time: a
    partition that is slower than another would be taken for its short steps again and again."""
    model = auto().model
    before = model.batch(load(), BUDGET, 0), model.beside(load(), 0)
    model.observe(Observed(Work.BATCH, load(), BUDGET, round(1.5 * before[0])))
    model.observe(Observed(Work.BESIDE, load(), BUDGET, round(1.5 * before[1])))
    assert model.batch(load(), BUDGET, 0) == pytest.approx(1.25 * before[0], rel=1e-3)
    assert model.beside(load(), 0) == pytest.approx(1.075 * before[1], rel=1e-3)


def test_what_has_no_prediction_teaches_nothing() -> None:
    """Red when prefill without decode rows, or a chunk larger than any table entry, moves a correction."""
    policy = auto(9.0)
    for work in (Work.DECODE, Work.MIXED, Work.BESIDE):
        policy.observe(Observed(work, load(rows=0), 128, 10**9))
    policy.observe(Observed(Work.MIXED, load(), 10**6, 10**9))
    assert policy.choose(load()) == auto(9.0).choose(load())


@given(
    rows=st.integers(0, 300),
    context=st.integers(0, 10**7),
    remaining=st.integers(1, 10**6),
    history=st.integers(0, 10**5),
    target=st.one_of(st.none(), st.floats(0.1, 1e4)),
)
def test_every_choice_can_be_carried_out(
    rows: int, context: int, remaining: int, history: int, target: float | None
) -> None:
    """Red when a choice holds no token, more than the budget, or waits beside nobody."""
    choice = auto(target).choose(Load(rows, context, remaining, min(remaining, 4096), history))
    assert 1 <= choice.tokens <= BUDGET
    assert (choice.way is Way.ALONE) == (rows == 0)


def test_the_partition_that_finishes_prompts_soonest_within_the_target() -> None:
    """The first partition takes 134 ms for 4096 tokens beside decode steps of 4.7 ms, the second 158 ms beside 4.2.
    Red when a partition is taken that breaks the target, or the slower of two that keep it."""
    times, slow = pretended_times(64, 2), 9
    times = replace(times, mixed=[(rows, tokens, slow * us) for rows, tokens, us in times.mixed])
    assert auto(6.0, times).choose(load()) == Choice(BUDGET, Way.LANE, 0)
    assert auto(4.8, times).choose(load()) == Choice(BUDGET, Way.LANE, 1)


def test_each_partition_is_observed_as_itself() -> None:
    """Red when a step beside a prefill is compared with another partition's times: the correction would drift though
    every prediction was right."""
    model = auto(times=pretended_times(64, 2)).model
    for partition in model.partitions:
        before = model.beside(load(), partition), model.batch(load(), 2048, partition)
        for work, us in zip((Work.BESIDE, Work.BATCH), before, strict=True):
            model.observe(Observed(work, load(), 2048, round(us), partition))
        after = model.beside(load(), partition), model.batch(load(), 2048, partition)
        assert after == pytest.approx(before, rel=1e-3)


def test_what_a_partition_teaches_stays_its_own() -> None:
    """Red when steps that took longer than expected beside one partition make another look slower, which was seen at
    work itself: the policy would go to and fro between them."""
    model = auto(times=pretended_times(64, 2)).model
    others = model.beside(load(), 1), model.batch(load(), 2048, 1)
    for work, us in zip((Work.BESIDE, Work.BATCH), others, strict=True):
        model.observe(Observed(work, load(), 2048, round(us), 1))
    for work in (Work.BESIDE, Work.BATCH):
        model.observe(Observed(work, load(), 2048, 10**6, 0))
    assert (model.beside(load(), 1), model.batch(load(), 2048, 1)) == others


@pytest.mark.parametrize("work", [Work.BESIDE, Work.BATCH])
def test_a_partition_that_was_not_seen_is_no_faster_than_the_others(work: Work) -> None:
    """Red when a partition that never worked is taken at what was measured at start, where all that did took 1.2 times
    as long: prompts would be sent there for it, and wait longer."""
    model = auto(times=pretended_times(64, 3)).model

    def predicted(partition: int) -> float:
        return model.beside(load(), partition) if work is Work.BESIDE else model.batch(load(), 2048, partition)

    measured = [1.2 * predicted(partition) for partition in model.partitions]
    for partition in (0, 1):
        for _ in range(60):
            model.observe(Observed(work, load(), 2048, round(measured[partition]), partition))
    assert [predicted(partition) for partition in model.partitions] == pytest.approx(measured, rel=1e-2)


def test_the_last_step_beside_a_batch_keeps_the_target_too() -> None:
    """A step takes 4.74 ms, and 0.15 to deliver. While 125 ms of prefill run 16 rows grow by 26 tokens each, which is
    1.05 ms at 2.5 us a token: 6.2 ms with the margin. Red when only the first step counts."""
    (only,) = TIMES.partitions
    slow = replace(TIMES, partitions=[replace(only, reading=[(64, 2500.0)])])
    assert auto(6.3, slow).choose(load()) == Choice(BUDGET, Way.LANE)
    assert auto(6.1, slow).choose(load()).way is Way.MIXED


def test_of_nearly_equal_ways_the_gentlest_to_decode() -> None:
    """Red when some ms of a prompt's time outweigh decode steps that take a tenth longer throughout."""
    times = pretended_times(64, 2)
    first, second = times.partitions
    nearly = replace(second, prefill=[(tokens, round(1.04 * us)) for tokens, us in first.prefill])
    times = replace(
        times, partitions=[first, nearly], mixed=[(rows, tokens, 9 * us) for rows, tokens, us in times.mixed]
    )
    assert auto(6.0, times).choose(load()) == Choice(BUDGET, Way.LANE, 1)


def test_a_short_prompt_s_few_ms_count_as_nothing() -> None:
    """Red when a prompt that is done 1.6 ms sooner takes SMs from decode, because that is 6 % of its time; a longer
    one that is done 18 ms sooner may."""
    times = pretended_times(64, 2)
    first, second = times.partitions
    slower = replace(second, prefill=[(tokens, round(1.15 * us)) for tokens, us in first.prefill])
    times = replace(
        times, partitions=[first, slower], mixed=[(rows, tokens, 99 * us) for rows, tokens, us in times.mixed]
    )
    assert auto(6.0, times).choose(load(remaining=512)).partition == 1
    assert auto(6.0, times).choose(load(remaining=4096)).partition == 0


@pytest.mark.parametrize(("rows", "partition"), [(1, 0), (16, 1)])
def test_what_all_wait_decides_among_ways_that_are_soon(rows: int, partition: int) -> None:
    """A prompt of 1024 tokens is done after 42 ms beside steps of 4.7 ms, or after 47 beside 4.2. Red when a prompt
    keeps sixteen decode rows waiting for its own few ms, or one row keeps the prompt."""
    times = pretended_times(64, 2)
    times = replace(times, mixed=[(count, tokens, 99 * us) for count, tokens, us in times.mixed])
    assert auto(6.0, times).choose(load(rows, remaining=1024)) == Choice(2048, Way.LANE, partition)


def test_rows_between_two_measured_counts_take_what_the_larger_does() -> None:
    """Red when a partition's times are looked up by another table's rows."""
    times = pretended_times(64)
    (only,) = times.partitions
    few = replace(times, partitions=[replace(only, decode=[(1, 4000), (64, 6000)])])
    assert auto(times=few).model.beside(load(2), 0) == auto(times=few).model.beside(load(64), 0) == 6000


def test_few_rows_read_their_context_more_slowly_on_a_partition() -> None:
    """Red when a partition's reading of KV is taken as the same for every number of rows."""
    (only,) = TIMES.partitions
    model = auto(times=replace(TIMES, partitions=[replace(only, reading=[(16, 80.0), (64, 50.0)])])).model
    for rows, ns in ((8, 80.0), (16, 80.0), (48, 50.0), (64, 50.0), (128, 50.0)):
        added = model.beside(load(rows, 100_000), 0) - model.beside(load(rows), 0)
        assert added == pytest.approx(ns * 100)
