"""How loaded the engine core is, for whoever routes requests: fresh figures and the rate between them.

Owns the sampling: askers that come close together share one call to the engine core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from greenlane.engine.v1 import engine_pb2

from frontend.engine_group import added_up
from frontend.request import ApiError, Code
from frontend.serving import Served

FRESH_S = 0.2
"""A sample this young is given again."""
RATE_S = 1.0
"""Shortest time over which a rate is taken."""


@dataclass(frozen=True, slots=True)
class Load:
    """One sample; the properties are what routers compare."""

    stats: engine_pb2.GetStatsResponse
    """Of all engine cores that answered, added up."""
    info: engine_pb2.GetInfoResponse
    engines: int
    """How many answered."""
    tokens_per_s: float
    waiting_tokens: int
    """Prompt tokens, of this frontend's requests, that the engine core hasn't begun with."""
    silent_tokens: int
    """The same, of requests without a first token yet."""

    @property
    def used_pages(self) -> int:
        return self.stats.gauges.pages_referenced + self.stats.gauges.pages_retiring

    @property
    def usage(self) -> float:
        """Share of the KV pages that can't be had by evicting cached ones, 0 to 1."""
        return self.used_pages / max(1, self.stats.gauges.pages_total)

    @property
    def slots(self) -> int:
        """Sequences that may run at once."""
        return self.info.limits.max_num_seqs * self.engines

    @property
    def hit_rate(self) -> float:
        """Share of the prompt pages looked up that the prefix cache had, since the engine core's start."""
        counters = self.stats.counters
        return counters.prefix_hits / max(1, counters.prefix_queries)


class LoadMeter:
    """Samples the engine core of one served model. `clock` is in seconds."""

    def __init__(self, served: Served, clock: Callable[[], float]) -> None:
        self._served = served
        self._clock = clock
        self._lock = asyncio.Lock()
        self._latest: Load | None = None
        self._taken = 0.0
        self._base = engine_pb2.GetStatsResponse()
        self._rate = 0.0

    async def sample(self) -> Load:
        """Raises ApiError (UNAVAILABLE) when the engine core doesn't answer."""
        async with self._lock:
            if self._latest is None or self._clock() - self._taken > FRESH_S:
                self._latest = None
                self._latest = await self._measure()
                self._taken = self._clock()
            return self._latest

    async def _measure(self) -> Load:
        each, info = await self._served.each_stats(), self._served.engine_info
        stats = added_up(each)
        if stats is None or info is None:
            raise ApiError(Code.UNAVAILABLE, "the engine core doesn't say how loaded it is")
        seconds = stats.uptime_s - self._base.uptime_s
        tokens = stats.counters.output_tokens - self._base.counters.output_tokens
        if seconds < 0 or tokens < 0:  # one was restarted, or doesn't answer
            self._base, self._rate = stats, 0.0
        elif seconds >= RATE_S:
            self._base, self._rate = stats, tokens / seconds
        answered = sum(one is not None for one in each)
        return Load(stats, info, answered, self._rate, *self._served.prompt_backlog())
