"""Ordinary load on each lane mode: fixed numbers of clients, Poisson arrivals, and how many a second keep the pace.

Loads by name: `cN` clients, `N/s` arrivals for 12 s, `goodput@N` arrivals for 20 s. A rate counts towards goodput when
ITL p99 <= 10 ms and TTFT p99 <= 300 ms.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from scripts.gpu.options import ROOT, Mode, Options, parse_mode, server_flags
from scripts.serving import ServeError, Serving, served

MODES = ("auto",)
ROWS = ("c1", "c8", "c16", "c32", "c64", "c128", "8/s", "16/s", "24/s", "goodput@8", "goodput@16")
SERVE_LOAD = ROOT / "scripts" / "bench" / "serve_load.py"
ROW_GUARD_S = 180.0
ITL_MS, TTFT_MS = 10.0, 300.0
WAYS = re.compile(r'^greenlane_engine_prefills_total\{.*way="(\w+)".*\} (\S+)$', re.MULTILINE)


def run(options: Options) -> Iterator[dict[str, Any]]:
    """For each mode a line with its flags, then one for each of its rows."""
    yield {"generator": load(["--null", "--concurrency=128"])}
    for mode in options.modes or map(parse_mode, MODES):
        yield from run_mode(options, mode)


def run_mode(options: Options, mode: Mode) -> Iterator[dict[str, Any]]:
    log = options.work / f"rows-{mode.label}.log"
    flags = server_flags(options, mode, "--no-enable-prefix-caching", "--log-level=warning")
    try:
        with served(options.model(), log, flags) as server:
            yield {"mode": mode.label, "flags": flags, "start_s": round(server.start_s, 1)}
            for repeat in range(options.repeats):
                for row in options.rows or ROWS:
                    line = measure(options, server, mode, row)
                    yield {"row": row, "shape": options.shape, "repeat": repeat, **line}
    except ServeError as error:
        yield {"row": "start", "label": mode.label, "error": str(error)}


def measure(options: Options, server: Serving, mode: Mode, row: str) -> dict[str, Any]:
    """serve_load.py's own line; what failed under `error`."""
    arguments = [f"--url={server.http}", f"--model={server.ready['info']['model']}", f"--label={mode.label}"]
    if row.startswith("c"):
        arguments.append(f"--concurrency={row[1:]}")
    elif row.startswith("goodput@"):
        arguments += [f"--rate={row.partition('@')[2]}", "--seconds=20"]
    else:
        arguments.append(f"--rate={row.partition('/')[0]}")
    if options.shape == "tiny":
        arguments += ["--input=64", "--vocab=4000"]
    before = prefills(server)
    measured = load(arguments)
    if row.startswith("goodput@") and "error" not in measured:
        measured["good"] = measured["itl_p99_ms"] <= ITL_MS and measured["ttft_p99_ms"] <= TTFT_MS
    measured["prefills"] = {way: count - before[way] for way, count in prefills(server).items()}
    return {"label": mode.label, **measured}


def prefills(server: Serving) -> dict[str, int]:
    """Launches of prompt tokens so far, by the way that they were computed."""
    page = httpx.get(f"{server.http}/metrics", trust_env=False).text
    return {way: round(float(count)) for way, count in WAYS.findall(page)}


def load(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, str(SERVE_LOAD), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ROW_GUARD_S, check=False)
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    *said, line = done.stdout.splitlines()
    print("\n".join(said), file=sys.stderr, flush=True)
    measured: dict[str, Any] = json.loads(line)
    return measured


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Output tok/s, TTFT, TPOT, ITL (ms, p50 / p99); a row a line, later lines win."""
    rows = {
        (line["shape"], line["row"], line["label"], line.get("repeat", 0)): line for line in lines if "shape" in line
    }
    out = [f"{'shape':<6} {'load':<12} {'mode':<16} {'tok/s':>8} {'TTFT':>15} {'TPOT':>13} {'ITL':>13}"]
    for (shape, row, label, _), line in rows.items():
        if "error" in line:
            out.append(f"{shape:<6} {row:<12} {label:<16} failed: {line['error'].strip().splitlines()[-1:]}")
            continue
        pairs = (f"{line[f'{what}_p50_ms']:g} / {line[f'{what}_p99_ms']:g}" for what in ("ttft", "tpot", "itl"))
        ttft, tpot, itl = pairs
        good = {True: "  good", False: "  not good", None: ""}[line.get("good")]
        out.append(f"{shape:<6} {row:<12} {label:<16} {line['output_tok_s']:>8} {ttft:>15} {tpot:>13} {itl:>13}{good}")
    return out
