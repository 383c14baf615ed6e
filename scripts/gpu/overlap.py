"""Overlap is real: from the GPU's own timing events, decode steps complete inside every long prefill.

Sixteen streams decode a 4B shape on their partition while prompts arrive. What the worker's step log says is checked,
and kept beside the results; that the two partitions share no SM, and what a completion event waits for, is tested in a
process of its own (tests/gpu/test_green_lanes.py).
"""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.gpu import itl, tests_on_gpu
from scripts.gpu.options import Options, parse_mode, server_flags
from scripts.serving import served

MODE = "green-48"
LOAD = "16@4096@2"
INJECTED_S = 5.0
LONG_PREFILL = 2048
LEAST_INSIDE = 3
GAP_MS = 1.0
"""How much longer than usual the primary lane may lie idle when a prefill is launched."""
STEPS = "h200-overlap.steps.jsonl.gz"

Line = dict[str, Any]


def run(options: Options) -> dict[str, Any]:
    mode = parse_mode(MODE)
    steps = options.work / "overlap.steps.jsonl"
    steps.unlink(missing_ok=True)
    flags = server_flags(options, mode, "--no-enable-prefix-caching", f"--step-log={steps}")
    with served(options.model(), options.work / "overlap.log", flags) as server:
        row = itl.measure(replace(options, injected_s=INJECTED_S), server, mode, LOAD)
    measured = {"flags": flags, "load": row, **read(steps)}
    (options.out / STEPS).write_bytes(gzip.compress(steps.read_bytes(), mtime=0))
    tested = tests_on_gpu.run(options, "test_green_lanes.py")
    return {**measured, "step_log": STEPS, "tests": tested, "broken": broken(measured) + tested.pop("broken")}


def broken(measured: dict[str, Any]) -> list[str]:
    checks = {
        "the load failed": "error" not in measured["load"],
        "the times are the host's": measured["clock"] == "gpu",
        f"no prefill of {LONG_PREFILL} tokens was beside decode": measured["long_prefills"] > 0,
        f"fewer than {LEAST_INSIDE} decode steps inside a long prefill": measured["inside_min"] >= LEAST_INSIDE,
        f"decode waits over {GAP_MS} ms at a launch": measured["launch_gap_over_usual_ms"]["p90"] <= GAP_MS,
    }
    return [what for what, held in checks.items() if not held]


def read(path: Path) -> dict[str, Any]:
    """What a step log says of overlap; times in ms."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    header = lines[0]
    decodes = sorted((line for line in lines if line["event"] == "decode"), key=lambda line: line["start"])
    prefills = [line for line in lines if line["event"] == "complete" and line["chunk_tokens"] >= LONG_PREFILL]
    inside = [completed_inside(prefill, decodes) for prefill in prefills]
    beside = [line for line in decodes if line["beside"] and not line["chunk_tokens"]]
    alone = [line for line in decodes if not line["beside"] and not line["chunk_tokens"]]
    return {
        "clock": header["clock"],
        "decode_sms": header["decode_sms"],
        "prefill_sms": header["prefill_sms"],
        "long_prefills": len(prefills),
        "inside": inside,
        "inside_min": min(inside, default=0),
        "prefill_ms": spread([duration(line) for line in prefills]),
        "decode_beside_ms": spread([duration(line) for line in beside]),
        "decode_alone_ms": spread([duration(line) for line in alone]),
        "launch_gap_over_usual_ms": spread(launch_gaps(lines, decodes)),
    }


def completed_inside(prefill: Line, decodes: list[Line]) -> int:
    return sum(prefill["start"] <= line["start"] and line["end"] <= prefill["end"] for line in decodes)


def duration(line: Line) -> float:
    return float(line["end"] - line["start"]) / 1e3


def launch_gaps(lines: list[Line], decodes: list[Line]) -> list[float]:
    """Idle time of the primary lane before each step that launched a prefill, over the median before other steps."""
    launched = {line["step"] for line in lines if line["event"] == "prefill_launch"}
    gaps = {
        after["step"]: (after["start"] - before["end"]) / 1e3
        for before, after in itertools.pairwise(decodes)
        if after["step"] == before["step"] + 1
    }
    usual = statistics.median([gap for step, gap in gaps.items() if step not in launched] or [0.0])
    return [gap - usual for step, gap in gaps.items() if step in launched]


def spread(values: list[float]) -> dict[str, float]:
    """Median, 90th percentile, largest."""
    if not values:
        return {"p50": 0.0, "p90": 0.0, "max": 0.0}
    ordered = sorted(values)
    return {
        "p50": round(ordered[len(ordered) // 2], 3),
        "p90": round(ordered[int(len(ordered) * 0.9)], 3),
        "max": round(ordered[-1], 3),
    }
