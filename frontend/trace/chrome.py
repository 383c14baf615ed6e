"""A step log as a Chrome trace, for ui.perfetto.dev and chrome://tracing: one track for each lane and one for the host.

Owns the mapping; the format is Google's "Trace Event Format" (complete and metadata events, µs).
"""

from __future__ import annotations

from typing import Any

from frontend.trace.read import Run

PRIMARY, PREFILL, HOST = 1, 2, 3
TRACKS = {PRIMARY: "primary lane", PREFILL: "prefill lane", HOST: "host"}


def chrome_trace(run: Run) -> dict[str, Any]:
    """The JSON object format of a trace."""
    head = run.header
    events = [_named("process_name", 0, f"{head.model} · {head.device} · overlap {head.overlap}")]
    events += [_named("thread_name", track, name) for track, name in TRACKS.items()]
    events += [{**_named("thread_sort_index", track, ""), "args": {"sort_index": track}} for track in TRACKS]
    for step in run.decodes:
        name = "decode" if not step.chunk_tokens else "decode + chunks" if step.decode_rows else "chunks"
        rows = {"step": step.step, "decode_rows": step.decode_rows, "chunk_tokens": step.chunk_tokens}
        events.append(_span(PRIMARY, name, step.start, step.end, rows))
    for join in run.joins:
        args = {"step": join.step, "prefill": join.prefill}
        events.append(_span(PRIMARY, "join", join.start, join.end, args))
    for batch in run.prefills:
        args = {"step": batch.step, "rows": batch.rows, "chunk_tokens": batch.chunk_tokens}
        events.append(_span(PREFILL, f"prefill of {batch.chunk_tokens}", batch.start, batch.end, args))
    for plan in run.launches:
        args = {"step": plan.step, "decode_rows": plan.decode_rows, "chunk_tokens": plan.chunk_tokens}
        events.append(_span(HOST, "launch", plan.at, plan.at + plan.host_us, args))
    for wait in run.waits:
        events.append(_span(HOST, "wait", wait.at, wait.at + wait.us, {"step": wait.step, "lane": wait.lane}))
    for idle in run.idles:
        events.append(_span(HOST, "idle", idle.at, idle.at + idle.us, {}))
    about = {"greenlane": head.greenlane, "clock": head.clock, "unix_time": head.unix_time}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": track, "name": what, "args": {"name": name}}


def _span(track: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    duration = round(end - start, 1)
    return {"ph": "X", "pid": 1, "tid": track, "name": name, "ts": start, "dur": duration, "args": args}
