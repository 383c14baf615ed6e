"""The mixed load on every lane mode: what streaming decoders feel while cold prompts arrive.

The rows are those of the target table, by name `DECODERS[@TOKENS@PER_SECOND]`; each mode has a server of its own on the
same shape, and its undisturbed rows come first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from scripts.gpu.options import ROOT, Mode, Options, digest, parse_mode, server_flags
from scripts.serving import ServeError, Serving, served

MODES = (
    *("off-256", "off-512", "off-2048", "stream"),
    *("green-24", "green-32", "green-48", "green-64", "green-80", "auto"),
)
ROWS = ("16", "16@4096@2", "16@4096@4", "32", "32@2048@8", "64", "64@8192@2")
ITL_MIX = ROOT / "scripts" / "bench" / "itl_mix.py"
ROW_GUARD_S = 120.0
OUTPUT = 8000
"""Tokens of a decoder: more than it gets to while its row is measured."""


def run(options: Options) -> Iterator[dict[str, Any]]:
    """For each mode a line with its flags, one for each of its rows, and one that names its step log."""
    for mode in options.modes or map(parse_mode, MODES):
        yield from run_mode(options, mode)


def run_mode(options: Options, mode: Mode) -> Iterator[dict[str, Any]]:
    log, steps = options.work / f"itl-{mode.label}.log", options.work / f"itl-{mode.label}.steps.jsonl"
    steps.unlink(missing_ok=True)
    flags = server_flags(options, mode, "--no-enable-prefix-caching", "--log-level=warning", f"--step-log={steps}")
    try:
        with served(options.model(), log, flags) as server:
            yield {"mode": mode.label, "flags": flags, "start_s": round(server.start_s, 1)}
            for row in options.rows or ROWS:
                yield measure(options, server, mode, row)
        yield {"mode": mode.label, "step_log": digest(steps)}
    except ServeError as error:
        yield {"row": "start", "label": mode.label, "error": str(error)}


def measure(options: Options, server: Serving, mode: Mode, row: str) -> dict[str, Any]:
    """itl_mix.py's own line, from a process of its own."""
    decoders, _, injection = row.partition("@")
    command = [sys.executable, str(ITL_MIX), "--url", server.http, "--model", server.ready["info"]["model"]]
    command += [
        "--label",
        mode.label,
        "--decoders",
        decoders,
        "--vocab",
        str(options.vocabulary),
        "--out",
        str(output(options)),
    ]
    if injection:
        length, per_second = injection.split("@")
        count = round(float(per_second) * options.injected_s)
        command += ["--inject-len", length, "--qps", per_second, "--n", str(count)]
    else:
        command += ["--inject-len", "0", "--qps", "0", "--seconds", str(options.undisturbed_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ROW_GUARD_S, check=False)
    if done.returncode:
        return {"label": mode.label, "row": row, "error": done.stderr[-2000:]}
    *said, line = done.stdout.splitlines()
    print("\n".join(said), file=sys.stderr, flush=True)
    measured: dict[str, Any] = {"row": row, **json.loads(line)}
    return measured


def output(options: Options) -> int:
    return min(OUTPUT, options.context - 200)


# ------------------------------ the table


def table(lines: list[dict[str, Any]]) -> list[str]:
    """ITL p50 / p99 / max and injected TTFT p50 (ms), decode tok/s; a row a line, later lines win."""
    rows = {(line["row"], line["label"]): line for line in lines if "row" in line}
    undisturbed = {
        row: line["itl_p50_ms"] for (row, label), line in rows.items() if label == "off-2048" and "error" not in line
    }
    out = [f"{'row':<12} {'mode':<16} {'p50':>7} {'p99':>7} {'max':>7} {'tok/s':>8} {'TTFT':>7}  p99 / lone p50 of off"]
    for row, label in sorted(rows, key=lambda key: ROWS.index(key[0]) if key[0] in ROWS else len(ROWS)):
        line = rows[row, label]
        if "error" in line:
            out.append(f"{row:<12} {label:<16} failed: {line['error'].strip().splitlines()[-1:]}")
            continue
        lone = undisturbed.get(row.partition("@")[0])
        ratio = f"{line['itl_p99_ms'] / lone:.2f}" if lone and line["itl_p99_ms"] else "–"
        ttft = line["ttft_p50_ms"] if line["ttft_p50_ms"] is not None else "–"
        late = "" if line["decoders_alive"] == line["decoders"] else "  decoders ended early"
        out.append(
            f"{row:<12} {label:<16} {line['itl_p50_ms']:>7} {line['itl_p99_ms']:>7} {line['itl_max_ms']:>7} "
            f"{line['decode_tok_s']:>8} {ttft:>7}  {ratio}{late}"
        )
    return out
