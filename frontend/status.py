"""What the page at `/` draws: one JSON object about the whole server, made when somebody asks.

Owns its shape. Counters are told as they stand, since the server's or the engine core's start; the page takes the
differences. Pages that ask at about the same time share one look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from frontend.engine_group import added_up
from frontend.metrics import Figures, Observed
from frontend.scrape import Scrape, Seen
from frontend.serving import Served

FRESH_S = 0.5
"""An answer this young is given again; pages ask once a second."""
ABOUT = ("instance_id", "device", "dtype")
LANES = ("overlap", "decode_sms", "prefill_sms")
LIMITS = ("max_num_seqs", "max_queue", "max_model_len")

Json = dict[str, Any]


class Status:
    """Of one served model. `clock` is in seconds."""

    def __init__(self, served: Served, scrape: Scrape, version: str, clock: Callable[[], float]) -> None:
        self._served = served
        self._scrape = scrape
        self._version = version
        self._clock = clock
        self._lock = asyncio.Lock()
        self._latest = b""
        self._expires = float("-inf")

    async def json(self) -> bytes:
        """The object, at most FRESH_S old."""
        async with self._lock:
            if self._clock() >= self._expires:
                self._latest = msgspec.json.encode(self._shape(await self._scrape.look()))
                self._expires = self._clock() + FRESH_S
            return self._latest

    def _shape(self, seen: Seen) -> Json:
        info = self._served.engine_info
        about: Json = {} if info is None else {name: getattr(info, name) for name in ABOUT}
        if info is not None:
            about["limits"] = {name: getattr(info.limits, name) for name in LIMITS}
        answered = [figures for figures in seen.frontends.values() if figures is not None]
        return {
            "version": self._version,
            "health": self._served.health.value,
            "model": self._served.names[0],
            "about": about or None,
            "engines": {"count": len(seen.engines), "answered": sum(each is not None for each in seen.engines)},
            "frontends": {"count": len(seen.frontends), "answered": len(answered)},
            "engine": _engine(seen),
            "requests": _requests(answered),
            "ttft": _together(figures.ttft for figures in answered),
            "itl": _together(figures.gap for figures in answered),
        }


def _engine(seen: Seen) -> Json | None:
    """All engine cores' gauges and counters, added up, and the lanes of the first; None if none answered."""
    total = added_up(seen.engines)
    if total is None:
        return None
    groups: dict[str, Any] = {"gauges": total.gauges, "counters": total.counters}
    figures = {
        name: {field.name: getattr(group, field.name) for field in group.DESCRIPTOR.fields}
        for name, group in groups.items()
    }
    lanes = next(each.lanes for each in seen.engines if each is not None)
    return {"uptime_s": total.uptime_s, "lanes": {name: getattr(lanes, name) for name in LANES}, **figures}


def _requests(answered: list[Figures]) -> Json:
    outcomes: dict[str, int] = {}
    for figures in answered:
        for outcome, count in figures.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    return {
        "open": sum(figures.open_requests for figures in answered),
        "outcomes": outcomes,
        "engine_fail_stops": sum(figures.fail_stops for figures in answered),
        "engine_sessions_lost": sum(figures.sessions_lost for figures in answered),
    }


def _together(histograms: Iterable[Observed]) -> Json:
    """Frontends' histograms of one kind, added up; bounds in seconds."""
    listed = list(histograms)
    columns = zip(*(observed.counts for observed in listed), strict=True)
    return {"bounds": listed[0].bounds, "counts": [sum(column) for column in columns]}
