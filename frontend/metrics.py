"""What a frontend counts of its own requests: outcomes, tokens, latencies.

Owns the counters and their snapshot, which travels to whichever frontend is scraped. Nothing here runs per token beyond
an addition or a bisection. Names and text are `exposition.py`'s.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec

OUTCOMES = ("stop", "length", "cancelled", "rejected", "failed")

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAP_BUCKETS_S = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)


class Observed(msgspec.Struct, frozen=True):
    """A histogram at one moment."""

    bounds: list[float]
    counts: list[int]
    """One more than bounds: the last is of what lies beyond."""
    sum: float


class Figures(msgspec.Struct, frozen=True):
    """One frontend's figures at one moment."""

    outcomes: dict[str, int]
    open_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    fail_stops: int
    sessions_lost: int
    unauthorized: int
    ttft: Observed
    gap: Observed
    duration: Observed


class Histogram:
    """Observations in buckets; one bisection and two additions each."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds = list(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observed(self) -> Observed:
        return Observed(self._bounds, list(self._counts), self._sum)


class Metrics:
    """One frontend's counters, changed by the code that serves requests."""

    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.gap = Histogram(GAP_BUCKETS_S)
        self.duration = Histogram(DURATION_BUCKETS_S)
        self.open_requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self._outcomes = dict.fromkeys(OUTCOMES, 0)

    def count_outcome(self, outcome: str) -> None:
        """One request ended; `outcome` is one of OUTCOMES (KeyError otherwise)."""
        self._outcomes[outcome] += 1

    def figures(self, fail_stops: int = 0, sessions_lost: int = 0, unauthorized: int = 0) -> Figures:
        """All of them now; the arguments are the engine client's and the key file's."""
        return Figures(
            outcomes=dict(self._outcomes),
            open_requests=self.open_requests,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            fail_stops=fail_stops,
            sessions_lost=sessions_lost,
            unauthorized=unauthorized,
            ttft=self.ttft.observed(),
            gap=self.gap.observed(),
            duration=self.duration.observed(),
        )
