"""The CUDA kernels on this machine's GPU: checked against float32 references, then timed.

Prints a table and writes JSON (card, driver, versions, commit, results). Exit code 1 if a check fails.

    python scripts/gpu_kernels.py [--out FILE] [--cache FOLDER] [--checks NAME ...] [--times NAME ...]

Checks run side by side in processes of their own, so that one that breaks its CUDA context breaks no other; timings run
one after another.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this file is run as a script

CHECK_NAMES = ("linear", "streamk", "matmul", "layer", "attention", "prefill", "sampling", "step")
TIME_NAMES = ("step", "linear", "streamk", "matmul", "attention", "sampling", "layer", "prefill", "lanes")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the CUDA kernels.")
    parser.add_argument("--out", type=Path, default=Path("h200-kernels.json"))
    parser.add_argument("--cache", type=Path, default=Path("/tmp/greenlane-kernels"))
    parser.add_argument("--checks", nargs="*", choices=CHECK_NAMES, default=CHECK_NAMES)
    parser.add_argument("--times", nargs="*", choices=TIME_NAMES, default=TIME_NAMES)
    parser.add_argument("--commit", default="", help="what the report names, where the checkout has no history")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, name = options.one
        return run_one(kind, name, options.cache)
    report: dict[str, Any] = {"machine": machine(options.commit), "checks": {}, "times": {}}
    with ThreadPoolExecutor(len(CHECK_NAMES)) as pool:
        runs = {name: pool.submit(in_process, "check", name, options.cache) for name in options.checks}
        for name, run in runs.items():
            report["checks"][name] = run.result()
            print(f"check {name:<10} {summary(report['checks'][name])}", flush=True)
    for name in options.times:
        report["times"][name] = in_process("time", name, options.cache)
        print_times(name, report["times"][name])
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    failed = [name for name, outcome in report["checks"].items() if "error" in outcome]
    print(f"failed: {failed}" if failed else "every check passed")
    return 1 if failed else 0


def in_process(kind: str, name: str, cache: Path) -> dict[str, Any]:
    """What a section measured; `error` and the tail of its output if it didn't end well."""
    command = [sys.executable, __file__, "--cache", str(cache), "--one", kind, name]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    last = done.stdout.splitlines()[-1:] or ["{}"]
    outcome = json.loads(last[0]) if last[0].startswith("{") else {}
    if done.returncode:
        outcome["error"] = (done.stdout + done.stderr)[-3000:]
    return {**outcome, "seconds": round(time.perf_counter() - start, 1)}


def run_one(kind: str, name: str, cache: Path) -> int:
    """One section in this process; its results as the last line of the output, also when it breaks off."""
    if kind == "check":
        from scripts.gpu_kernel_checks import CHECKS

        print(json.dumps({"measured": CHECKS[name](cache)}))
        return 0
    from scripts.gpu_kernel_times import TIMES

    rows: list[dict[str, float | int | str]] = []
    try:
        rows.extend(TIMES[name](cache))
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        print(json.dumps({"rows": rows}))
    return 0


def summary(outcome: dict[str, Any]) -> str:
    if "error" in outcome:
        return f"FAILED in {outcome['seconds']} s\n{outcome['error']}"
    worst = max(outcome["measured"].values())
    return f"ok, {len(outcome['measured'])} measured, largest {worst:.2e}, {outcome['seconds']} s"


def print_times(name: str, outcome: dict[str, Any]) -> None:
    print(f"--- {name} ({outcome['seconds']} s)")
    for row in outcome.get("rows", []):
        figures = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  " + " | ".join(figures), flush=True)
    if "error" in outcome:
        print(outcome["error"])


def machine(commit: str) -> dict[str, str]:
    """The card, its driver, the versions and the commit that the figures belong to."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    names = ("torch", "flashinfer-python", "cuda-bindings")
    return {"card": card, "driver": driver, "python": platform.python_version(), "commit": commit or "unknown"} | {
        name: version(name) for name in names
    }


if __name__ == "__main__":
    sys.exit(main())
