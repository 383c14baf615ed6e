"""docs/grafana.json asks for what /metrics tells, and for all of it that an operator should see."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from greenlane.engine.v1 import engine_pb2 as pb
from prometheus_client.parser import text_string_to_metric_families

from frontend.exposition import render
from frontend.metrics import Metrics

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


def exposed() -> dict[str, set[str]]:
    """Label names of every sample that a scrape gives, by its name."""
    out: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(render({1: Metrics().figures()}, [pb.GetStatsResponse()]).decode()):
        for sample in family.samples:
            out.setdefault(sample.name, set()).update(sample.labels)
    return out


def expressions() -> list[str]:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_every_metric_asked_for_exists() -> None:
    """Red if the dashboard names a metric that /metrics doesn't have, or groups by a label that it doesn't bear."""
    known = exposed()
    for expression in expressions():
        asked = re.findall(r"greenlane_\w+", expression)
        assert asked, expression
        assert [name for name in asked if name not in known] == []
        for labels in re.findall(r"by \((.*?)\)", expression):
            assert set(labels.split(", ")) <= set.intersection(*(known[name] for name in asked)), expression


def test_legends_name_labels_that_are_there() -> None:
    """Red if a legend shows a label that its query drops."""
    board: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                grouped = re.findall(r"by \((.*?)\)", target["expr"])
                asked = re.findall(r"greenlane_\w+", target["expr"])
                kept = [each.split(", ") for each in grouped] or [list(exposed()[name]) for name in asked]
                assert all(label in each for each in kept), panel["title"]


def test_what_operators_look_for_is_shown() -> None:
    """Red if a panel goes that an operator needs: outcomes, queue, latencies, pages, lanes, failures."""
    asked = set(re.findall(r"greenlane_\w+", " ".join(expressions())))
    assert asked >= {
        "greenlane_frontend_requests_total",
        "greenlane_engine_waiting",
        "greenlane_engine_running",
        "greenlane_time_to_first_token_seconds_bucket",
        "greenlane_inter_token_latency_seconds_bucket",
        "greenlane_request_duration_seconds_bucket",
        "greenlane_engine_pages_free",
        "greenlane_engine_prefix_hits_total",
        "greenlane_engine_lane_busy_seconds_total",
        "greenlane_engine_steps_total",
        "greenlane_engine_prefills_in_flight",
        "greenlane_frontend_engine_fail_stops_total",
    }
