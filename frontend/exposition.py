"""Prometheus text: the figures of all frontends of a server, and the engine core's, under their names.

Owns the names (`greenlane_…`, units in the name) and the help texts. A frontend's series bear its place as the label
`frontend`, an engine core's the label `engine` likewise, so that each has resets of its own; engine cores stand there
once, whichever frontend is scraped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from greenlane.engine.v1 import engine_pb2
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from frontend.metrics import Figures, Observed

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MICRO = 1e-6

ENGINE_COUNTERS = {
    "sequences_accepted": "Sequences admitted to the engine core's queue",
    "sequences_rejected": "Sequences that the engine core refused",
    "sequences_started": "Sequences whose first prefill was scheduled",
    "prompt_tokens": "Prompt tokens of admitted requests",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "output_tokens": "Tokens sampled and published",
    "preemptions": "Running sequences sent back to the queue for lack of pages",
    "prefix_queries": "Pages looked up in the prefix cache",
    "prefix_hits": "Pages found in the prefix cache",
    "prefill_launches": "Steps with chunks of prompts",
    "prefill_completions": "Prefill batches proven complete",
    "rows_discarded": "Rows computed behind a stop that was found late",
}
"""Fields of greenlane.engine.v1.Counters, each a metric of its own."""
Labelled = dict[str, tuple[str, str | None, dict[str, str]]]
ENGINE_LABELLED: Labelled = {
    "sequences_finished": (
        "Sequences that ended: by eos or a stop id, max_tokens or a full context, their client, a failure or a grammar "
        "that can't be compiled",
        "outcome",
        {"stop": "finished_stop", "length": "finished_length", "abort": "finished_abort", "error": "finished_error"},
    ),
    "steps": (
        "Steps whose results are back, by what their own forward computed",
        "kind",
        {kind: f"steps_{kind}" for kind in ("decode", "prefill", "mixed", "empty")},
    ),
    "prefills": (
        "Steps with chunks of prompts, by where these were computed: alone, in decode's forward, on the prefill lane",
        "way",
        {way: f"prefills_{way}" for way in ("alone", "mixed", "lane")},
    ),
}
"""Name, help, label, and the field behind each of the label's values."""
ENGINE_TIMES: Labelled = {
    "queue_wait_seconds": ("Time in the queue of the sequences that were started", None, {"": "queue_wait_us"}),
    "lane_busy_seconds": (
        "Time that lanes computed: the primary one forwards, the other prefill batches",
        "lane",
        {"primary": "primary_busy_us", "prefill": "prefill_busy_us"},
    ),
}
"""The same, of fields in µs."""
ENGINE_GAUGES = {
    "running": "Sequences that hold a slot",
    "waiting": "Sequences in the queue",
    "sessions": "Frontends connected to the engine core",
    "pages_total": "KV pages",
    "pages_free": "KV pages on the free list",
    "pages_cached": "Unreferenced KV pages kept for the prefix cache",
    "pages_referenced": "KV pages held by running sequences",
    "pages_retiring": "KV pages released and waiting for the proof that no lane touches them",
    "steps_in_flight": "Steps submitted and not yet answered",
    "prefills_in_flight": "Prefill batches submitted and not yet proven complete",
}
FRONTEND_COUNTERS: dict[str, tuple[str, Callable[[Figures], int]]] = {
    "prompt_tokens": ("Prompt tokens of finished requests", lambda figures: figures.prompt_tokens),
    "cached_tokens": ("Those that the prefix cache held", lambda figures: figures.cached_tokens),
    "output_tokens": ("Tokens sent on to clients", lambda figures: figures.output_tokens),
    "unauthorized": ("Calls turned away for want of a key", lambda figures: figures.unauthorized),
    "engine_fail_stops": ("Times that the engine core said it had failed", lambda figures: figures.fail_stops),
    "engine_sessions_lost": ("Sessions with the engine core that were lost", lambda figures: figures.sessions_lost),
}
LATENCIES: dict[str, tuple[str, Callable[[Figures], Observed]]] = {
    "time_to_first_token": ("From the request to its first token", lambda figures: figures.ttft),
    "inter_token_latency": ("Between deliveries of new tokens of one request", lambda figures: figures.gap),
    "request_duration": ("From the request to its end", lambda figures: figures.duration),
}
Frontends = Mapping[int, Figures | None]
"""By place; None: that frontend didn't answer."""
Engines = Sequence[engine_pb2.GetStatsResponse | None]
"""What GetStats of each core answered just now, in the order of --engine-address; None: it couldn't be reached."""


def render(frontends: Frontends, engines: Engines) -> bytes:
    """Prometheus text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed([*_of_frontends(frontends), *_of_engines(engines)]))
    return generate_latest(registry)


class _Fixed(Collector):
    """Families that stand already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_frontends(frontends: Frontends) -> Iterable[Metric]:
    label = ["frontend"]
    up = GaugeMetricFamily("greenlane_frontend_up", "Whether the frontend answered this scrape", labels=label)
    answered: dict[str, Figures] = {}
    for number, told in sorted(frontends.items()):
        up.add_metric([str(number)], float(told is not None))
        if told is not None:
            answered[str(number)] = told
    yield up
    requests = CounterMetricFamily(
        "greenlane_frontend_requests", "Requests that ended, by outcome", labels=[*label, "outcome"]
    )
    opened = GaugeMetricFamily("greenlane_frontend_open_requests", "Requests being served", labels=label)
    for place, figures in answered.items():
        opened.add_metric([place], float(figures.open_requests))
        for outcome, count in figures.outcomes.items():
            requests.add_metric([place, outcome], float(count))
    yield from (requests, opened)
    for name, (text, count_of) in FRONTEND_COUNTERS.items():
        counter = CounterMetricFamily(f"greenlane_frontend_{name}", text, labels=label)
        for place, figures in answered.items():
            counter.add_metric([place], float(count_of(figures)))
        yield counter
    for name, (text, observed_of) in LATENCIES.items():
        histogram = HistogramMetricFamily(f"greenlane_{name}_seconds", text, labels=label)
        for place, figures in answered.items():
            observed = observed_of(figures)
            histogram.add_metric([place], buckets(observed), observed.sum)
        yield histogram


def buckets(observed: Observed) -> list[tuple[str, float]]:
    """Cumulative, by upper bound."""
    cumulative, out = 0, []
    for bound, count in zip([*map(repr, observed.bounds), "+Inf"], observed.counts, strict=True):
        cumulative += count
        out.append((bound, float(cumulative)))
    return out


def _of_lanes(answered: Mapping[str, engine_pb2.GetStatsResponse]) -> Iterable[Metric]:
    """The mode and the split in force; 0 SMs where the device has none to count."""
    sms = GaugeMetricFamily(
        "greenlane_engine_lane_sms",
        "SMs of decode while a prefill is in flight, and of the prefill lane",
        labels=["engine", "overlap", "lane"],
    )
    alignment = GaugeMetricFamily("greenlane_engine_sm_alignment", "SMs that a split moves by", labels=["engine"])
    for number, stats in answered.items():
        for lane, count in (("primary", stats.lanes.decode_sms), ("prefill", stats.lanes.prefill_sms)):
            sms.add_metric([number, stats.lanes.overlap, lane], float(count))
        alignment.add_metric([number], float(stats.lanes.sm_alignment))
    yield from (sms, alignment)


def _of_engines(engines: Engines) -> Iterable[Metric]:
    up = GaugeMetricFamily("greenlane_engine_up", "Whether the engine core answered this scrape", labels=["engine"])
    answered: dict[str, engine_pb2.GetStatsResponse] = {}
    for place, told in enumerate(engines, 1):
        up.add_metric([str(place)], float(told is not None))
        if told is not None:
            answered[str(place)] = told
    yield up
    uptime = GaugeMetricFamily("greenlane_engine_uptime_seconds", "Since the engine core started", labels=["engine"])
    for number, stats in answered.items():
        uptime.add_metric([number], stats.uptime_s)
    yield uptime
    yield from _of_lanes(answered)
    for name, text in ENGINE_GAUGES.items():
        gauge = GaugeMetricFamily(f"greenlane_engine_{name}", text, labels=["engine"])
        for number, stats in answered.items():
            gauge.add_metric([number], float(getattr(stats.gauges, name)))
        yield gauge
    plain: Labelled = {name: (text, None, {"": name}) for name, text in ENGINE_COUNTERS.items()}
    for table, unit in ((plain, 1.0), (ENGINE_LABELLED, 1.0), (ENGINE_TIMES, MICRO)):
        for name, (text, label, fields) in table.items():
            bears = ["engine", label] if label else ["engine"]
            counter = CounterMetricFamily(f"greenlane_engine_{name}", text, labels=bears)
            for number, stats in answered.items():
                for value, field in fields.items():
                    labels = [number, value] if label else [number]
                    counter.add_metric(labels, unit * getattr(stats.counters, field))
            yield counter
