"""What a frontend counts and how it says so."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from greenlane.engine.v1 import engine_pb2 as pb
from prometheus_client.parser import text_string_to_metric_families

from frontend.exposition import buckets, render
from frontend.metrics import Histogram, Metrics
from frontend.request import ApiError, Code, Delta, TextRequest
from tests.unit.scripted_answers import Site, words

ENDS = ("stop", "length", "abort", "error")
LABELLED = {
    **{f"finished_{end}": f"greenlane_engine_sequences_finished_total 1 {end}" for end in ENDS},
    **{f"steps_{kind}": f"greenlane_engine_steps_total 1 {kind}" for kind in ("decode", "prefill", "mixed", "empty")},
    **{f"prefills_{way}": f"greenlane_engine_prefills_total 1 {way}" for way in ("alone", "mixed", "lane")},
    "queue_wait_us": "greenlane_engine_queue_wait_seconds_total 1",
    "primary_busy_us": "greenlane_engine_lane_busy_seconds_total 1 primary",
    "prefill_busy_us": "greenlane_engine_lane_busy_seconds_total 1 prefill",
}
"""Counters of GetStats that share a metric, or have another unit. `steps` has none: its kinds add up to it."""


def samples(text: bytes) -> dict[str, float]:
    """Values by name, or by name and labels where there are any."""
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_histogram_buckets() -> None:
    """Red if a value on a bound lands above it, or buckets aren't cumulative."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert buckets(histogram.observed()) == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.observed().sum == 12.0


def test_every_engine_figure_is_shown() -> None:
    """Red if a gauge or counter of GetStats has no metric, or one is shown under another's name."""
    stats = pb.GetStatsResponse(uptime_s=2.5)
    groups: list[tuple[Any, int]] = [(stats.gauges, 0), (stats.counters, 1000)]
    for group, base in groups:
        for number, field in enumerate(group.DESCRIPTOR.fields, 1):
            setattr(group, field.name, base + number)
    found = samples(render({}, [stats]))
    fields: list[Any] = [*stats.gauges.DESCRIPTOR.fields]
    expected: dict[str, Any] = {f"greenlane_engine_{field.name} 1": at for at, field in enumerate(fields, 1)}
    fields = [*stats.counters.DESCRIPTOR.fields]
    unlabelled = {field.name: at for at, field in enumerate(fields, 1001)}
    for name, metric in LABELLED.items():
        unit = 1e-6 if name.endswith("_us") else 1.0
        expected[metric] = pytest.approx(unit * unlabelled.pop(name))
    expected |= {f"greenlane_engine_{name}_total 1": value for name, value in unlabelled.items() if name != "steps"}
    assert {name: found.get(name) for name in expected} == expected
    assert (found["greenlane_engine_up 1"], found["greenlane_engine_uptime_seconds 1"]) == (1.0, 2.5)


def test_no_engine_no_figures() -> None:
    """Red if an engine core that doesn't answer is shown with old figures."""
    render({}, [pb.GetStatsResponse(uptime_s=2.5)])
    found = samples(render({1: Metrics().figures()}, [None]))
    assert found["greenlane_engine_up 1"] == 0.0
    assert not any(name.startswith("greenlane_engine_") for name in found if name != "greenlane_engine_up 1")


async def test_latencies_and_tokens() -> None:
    """Red if a request's times are taken from another moment, or tokens are counted twice."""
    site = Site()
    site.script.steps = [[Delta(0, "", [])], *words("a", "b"), [Delta(0, "", [], finish_reason="length")]]
    async with site.served.start(TextRequest([1, 2])) as request:
        await request.accepted()
        async for _ in request:
            site.time += 0.03
    found = samples(render({1: site.served.figures()}, [None]))
    assert found["greenlane_time_to_first_token_seconds_sum 1"] == 0.03
    assert found["greenlane_inter_token_latency_seconds_count 1"] == 1.0
    assert found["greenlane_inter_token_latency_seconds_sum 1"] == 0.03
    assert found["greenlane_request_duration_seconds_sum 1"] == 0.12
    assert found["greenlane_frontend_output_tokens_total 1"] == 2.0
    assert found["greenlane_frontend_prompt_tokens_total 1"] == 2.0
    assert found["greenlane_frontend_cached_tokens_total 1"] == 3.0


def test_every_frontend_has_series_of_its_own() -> None:
    """Red if frontends' figures are mixed, one that doesn't answer looks like one without requests, or a histogram's
    series of two frontends share a bucket."""
    one, two = Metrics(), Metrics()
    one.count_outcome("stop")
    two.ttft.observe(0.03)
    found = samples(
        render({2: two.figures(fail_stops=4, sessions_lost=5, unauthorized=6), 1: one.figures(), 3: None}, [None])
    )
    assert [found[f"greenlane_frontend_up {place}"] for place in (1, 2, 3)] == [1.0, 1.0, 0.0]
    assert [found[f"greenlane_frontend_requests_total {place} stop"] for place in (1, 2)] == [1.0, 0.0]
    assert "greenlane_frontend_open_requests 3" not in found
    name = "greenlane_time_to_first_token_seconds_count"
    assert (found[f"{name} 1"], found[f"{name} 2"]) == (0.0, 1.0)
    assert found["greenlane_frontend_engine_fail_stops_total 2"] == 4.0
    assert found["greenlane_frontend_engine_sessions_lost_total 2"] == 5.0
    assert found["greenlane_frontend_unauthorized_total 2"] == 6.0


async def test_one_outcome_a_request() -> None:
    """Red if a request isn't counted, is counted twice, or under another outcome; or stays open."""
    site = Site()
    failure = ApiError(Code.INTERNAL, "failed")
    site.script.next_steps = [words("a", finish="stop"), words("a", finish="length"), words("a", "b"), [failure]]
    for stop_after in (9, 9, 1, 9):
        request = site.served.start(TextRequest([1]))
        assert site.metrics.open_requests == 1
        with contextlib.suppress(ApiError):
            async for _ in request:
                stop_after -= 1
                if not stop_after:
                    break
        await request.aclose()
        await request.aclose()
    site.script.refusal = failure
    with pytest.raises(ApiError, match="failed"):
        async with site.served.start(TextRequest([1])) as request:
            await request.accepted()
    assert site.metrics.open_requests == 0
    assert site.metrics._outcomes == {"stop": 1, "length": 1, "cancelled": 1, "failed": 1, "rejected": 1}


async def test_idle_means_none_open() -> None:
    """Red if draining ends before the last call has, or never."""
    site = Site()
    with site.served.call():
        with site.served.call():
            pass
        assert not site.served._idle.is_set()
    await site.served.idle()
