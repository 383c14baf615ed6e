"""What the page at `/` is told about the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from frontend.config import Place
from frontend.metrics import GAP_BUCKETS_S
from frontend.peers import Peers
from frontend.request import ApiError, Code
from frontend.scrape import Scrape
from frontend.status import FRESH_S, Status
from tests.unit.scripted_answers import Site


def status_of(site: Site, peers: Peers | None = None) -> Status:
    return Status(site.served, Scrape(site.served, peers or Peers(Place())), "1.2.3", lambda: site.time)


async def told(status: Status) -> Any:
    return json.loads(await status.json())


async def test_every_engine_figure_is_told() -> None:
    """Red if a gauge or counter of GetStats is left out, or the lanes and limits are another's."""
    site = Site()
    lanes = site.engine.stats.lanes
    lanes.overlap, lanes.decode_sms, lanes.prefill_sms = "green", 48, 84
    gauges, counters = site.engine.stats.gauges, site.engine.stats.counters
    for group in (gauges, counters):
        fields: Any = group.DESCRIPTOR.fields
        for number, field in enumerate(fields, 1):
            setattr(group, field.name, number)
    shape = await told(status_of(site))
    assert (shape["health"], shape["model"], shape["version"]) == ("serving", "austen", "1.2.3")
    assert shape["engine"]["lanes"] == {"overlap": "green", "decode_sms": 48, "prefill_sms": 84}
    assert shape["about"]["limits"]["max_model_len"] == 2048
    assert shape["engine"]["uptime_s"] == 5.0
    for name, group in (("gauges", gauges), ("counters", counters)):
        fields = group.DESCRIPTOR.fields
        assert shape["engine"][name] == {field.name: number for number, field in enumerate(fields, 1)}


async def test_a_lost_engine_core_is_not_told_of_as_it_was() -> None:
    """Red if old figures stand for an engine core that doesn't answer."""
    site = Site()
    site.engine.failure = ApiError(Code.UNAVAILABLE, "gone")
    shape = await told(status_of(site))
    assert (shape["engine"], shape["engines"]) == (None, {"count": 1, "answered": 0})
    site.engine.info = None
    site.time += FRESH_S
    status = status_of(site)
    assert (await told(status))["about"] is None


async def test_all_frontends_are_added_up(tmp_path: Path) -> None:
    """Red if a request or latency of another frontend is missing, counted twice, or one that is away ends the page."""
    sites = Site(), Site()
    for site, gap in zip(sites, (0.0035, 9.0), strict=True):
        site.metrics.count_outcome("stop")
        site.metrics.open_requests = 2
        site.metrics.gap.observe(gap)
    sites[1].engine.fail_stops = 3
    peers = [Peers(Place(number, 2, str(tmp_path))) for number in (1, 2)]
    for each in peers:
        await each.start()
    status = status_of(sites[0], peers[0])
    Scrape(sites[1].served, peers[1])
    both = await told(status)
    assert (both["requests"]["open"], both["requests"]["outcomes"]["stop"]) == (4, 2)
    assert both["requests"]["engine_fail_stops"] == 3
    assert both["itl"]["bounds"] == list(GAP_BUCKETS_S)
    assert [at for at, count in enumerate(both["itl"]["counts"]) if count] == [3, len(GAP_BUCKETS_S)]
    assert both["frontends"] == {"count": 2, "answered": 2}
    await peers[1].stop()
    sites[0].time += FRESH_S
    alone = await told(status)
    assert (alone["requests"]["open"], alone["frontends"]) == (2, {"count": 2, "answered": 1})
    await peers[0].stop()


async def test_pages_share_a_look() -> None:
    """Red if every open page asks the engine core anew, or a page is shown figures older than FRESH_S."""
    site = Site()
    status = status_of(site)
    first = await told(status)
    site.metrics.count_outcome("stop")
    site.time += 0.9 * FRESH_S
    assert await told(status) == first
    site.time += 0.2 * FRESH_S
    assert (await told(status))["requests"]["outcomes"]["stop"] == 1
