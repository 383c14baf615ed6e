"""What a frontend counts, in Prometheus text: its own requests and latencies, and the engine core's fresh figures.

Owns the names (`greenlane_…`, units in the name) and a registry of its own. Nothing here runs per token beyond an
addition or a bisection: histograms are plain lists that a collector turns into samples when somebody asks.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from greenlane.engine.v1 import engine_pb2
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("stop", "length", "cancelled", "rejected", "failed")

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAP_BUCKETS_S = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)

_COUNTER_HELP = {
    "sequences_accepted": "Sequences admitted to the engine core's queue",
    "sequences_rejected": "Sequences that the engine core refused",
    "finished_stop": "Sequences ended by eos or a stop id",
    "finished_length": "Sequences ended by max_tokens or a full context",
    "finished_abort": "Sequences ended by their client",
    "finished_error": "Sequences that failed after admission",
    "prompt_tokens": "Prompt tokens of admitted requests",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "output_tokens": "Tokens sampled and published",
    "steps": "Engine steps",
    "preemptions": "Running sequences sent back to the queue for lack of pages",
    "prefix_queries": "Pages looked up in the prefix cache",
    "prefix_hits": "Pages found in the prefix cache",
    "prefill_launches": "Prefill batches launched",
    "prefills_alone": "Steps with chunks of prompts and no decode row",
    "prefills_mixed": "Steps whose chunks shared the decode rows' forward",
    "prefills_lane": "Steps whose chunks went to the prefill lane",
    "prefill_completions": "Prefill batches proven complete",
    "rows_discarded": "Rows computed behind a stop that was found late",
}
_GAUGE_HELP = {
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


class Histogram:
    """Observations in buckets; one bisection and two additions each."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds = list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        cumulative, buckets = 0, []
        for bound, count in zip([*map(repr, self._bounds), "+Inf"], self._counts, strict=True):
            cumulative += count
            buckets.append((bound, float(cumulative)))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """One frontend's figures. Requests are counted by the code that serves them; `render` adds the engine's."""

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.gap = Histogram(GAP_BUCKETS_S)
        self.duration = Histogram(DURATION_BUCKETS_S)
        self.open_requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._engine: engine_pb2.GetStatsResponse | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_outcome(self, outcome: str) -> None:
        """One request ended; `outcome` is one of OUTCOMES (KeyError otherwise)."""
        self._outcomes[outcome] += 1

    def render(self, engine: engine_pb2.GetStatsResponse | None) -> bytes:
        """Prometheus text. `engine` is what GetStats answered just now; None: it couldn't be reached."""
        self._engine = engine
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from self._own()
        up = GaugeMetricFamily("greenlane_engine_up", "Whether the engine core answered this scrape")
        up.add_metric([], 0.0 if self._engine is None else 1.0)
        yield up
        if self._engine is not None:
            yield from _of_engine(self._engine)

    def _own(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "greenlane_frontend_requests", "Requests of this frontend that ended, by outcome", labels=["outcome"]
        )
        for outcome, count in self._outcomes.items():
            requests.add_metric([outcome], float(count))
        yield requests
        yield GaugeMetricFamily("greenlane_frontend_open_requests", "Requests being served", float(self.open_requests))
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of finished requests", self.prompt_tokens),
            ("cached_tokens", "Prompt tokens of finished requests that the prefix cache held", self.cached_tokens),
            ("output_tokens", "Tokens sent on to clients", self.output_tokens),
        ):
            yield CounterMetricFamily(f"greenlane_frontend_{name}", text, float(value))
        yield self.ttft.family("greenlane_time_to_first_token_seconds", "From the request to its first token")
        yield self.gap.family(
            "greenlane_inter_token_latency_seconds",
            "Between deliveries of new tokens of one request",
        )
        yield self.duration.family("greenlane_request_duration_seconds", "From the request to its end")


def _of_engine(stats: engine_pb2.GetStatsResponse) -> Iterable[Metric]:
    yield GaugeMetricFamily("greenlane_engine_uptime_seconds", "Since the engine core started", stats.uptime_s)
    for name, text in _GAUGE_HELP.items():
        yield GaugeMetricFamily(f"greenlane_engine_{name}", text, float(getattr(stats.gauges, name)))
    for name, text in _COUNTER_HELP.items():
        yield CounterMetricFamily(f"greenlane_engine_{name}", text, float(getattr(stats.counters, name)))
