"""Several frontends on one port: connections spread, one scrape tells of all, and what it tells adds up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from frontend.ports import LISTENERS
from tests.e2e.conftest import MakeServer
from tests.e2e.harness import long_request, until

pytestmark = pytest.mark.e2e


def test_frontends_share_a_port(make_server: MakeServer) -> None:
    """Red if frontends listen on different ports, the VllmEngine's included, or one of them gets no connection."""
    server = make_server("--frontends=2", "--vllm-grpc-port=0")
    assert [len(server.ready[each.kind]) for each in LISTENERS] == [1, 1, 1]
    ends = [server.call_on(number, long_request(max_tokens=200)).join().status for number in (1, 2)]
    assert ends == [grpc.StatusCode.OK] * 2
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.complete(max_tokens=2).status_code, range(48)))
    assert answers == [200] * 48
    found = server.metrics()
    each = [found["greenlane_frontend_requests_total", str(number), "length"] for number in (1, 2)]
    assert min(each) > 1, "one frontend got nearly all"
    assert found["greenlane_engine_sessions", "1"] == 2.0


def test_a_scrape_reconciles_with_the_ledger(make_server: MakeServer) -> None:
    """Red if a request is counted twice or not at all, on either side of the session, or a gauge needs steps."""
    server = make_server("--frontends=2")
    for number in (1, 2):
        call = server.call_on(number, long_request())
        call.call.cancel()
        call.join()
    for length in (1, 5):
        server.complete(max_tokens=length)
    server.complete(max_tokens=3, n=3)
    assert server.complete(max_tokens=10**6).status_code == 400
    until(server.idle, "everything has ended")
    found = server.metrics()

    def total(name: str, *last: str) -> float:
        return sum(value for key, value in found.items() if key[0] == name and key[len(key) - len(last) :] == last)

    accepted = found["greenlane_engine_sequences_accepted_total", "1"]
    assert accepted == total("greenlane_engine_sequences_finished_total")
    assert accepted == found["greenlane_engine_sequences_started_total", "1"]
    assert found["greenlane_engine_sequences_finished_total", "1", "length"] == 5.0
    assert total("greenlane_frontend_requests_total", "length") == 3.0
    cancelled = total("greenlane_frontend_requests_total", "cancelled")
    assert cancelled == found["greenlane_engine_sequences_finished_total", "1", "abort"] >= 2.0
    assert total("greenlane_request_duration_seconds_count") == total("greenlane_frontend_requests_total")
    assert total("greenlane_frontend_open_requests") == found["greenlane_engine_running", "1"] == 0.0
    assert total("greenlane_engine_steps_total") == server.stats().counters.steps
    assert found["greenlane_engine_lane_busy_seconds_total", "1", "primary"] > 0.0
    pages = ("free", "cached", "referenced", "retiring")
    held = sum(found[f"greenlane_engine_pages_{each}", "1"] for each in pages)
    assert held == found["greenlane_engine_pages_total", "1"]
