"""CPU that an idle server uses: every process of `greenlane serve` over 30 s, once it has answered and gone quiet.

Prints a table, then one JSON line: `idle_core_pct` is the percentage of one core that the whole tree used, scaled by
the yardstick of `scale.py`; `measured_pct` is what this machine showed.

    python scripts/bench/idle_cpu.py [--model FOLDER] [--seconds 30]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is run as a script

from scripts.bench.scale import factor
from scripts.serving import TINY, Serving, cpu_seconds, served

SETTLE_S = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU use of an idle server, in per cent of one core.")
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(options.model, Path(folder) / "serve.log") as server:
        complete(server)
        time.sleep(SETTLE_S)
        used, scale = measure(server, options.seconds)
    measured = sum(used.values())
    for role, percent in (*used.items(), ("all", measured), ("all, scaled", measured * scale)):
        print(f"{role:<28} {percent:6.3f} %")
    result = {"idle_core_pct": measured * scale, "measured_pct": measured, "scale": scale, "seconds": options.seconds}
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))
    return 0


def complete(server: Serving) -> None:
    """One request, so that whatever a first request starts has been started."""
    body = json.dumps({"model": server.ready["info"]["model"], "prompt": "Once", "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{server.http}/v1/completions", body, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        response.read()


def measure(server: Serving, seconds: float) -> tuple[dict[str, float], float]:
    """Per cent of a core by role, over that many seconds; and the yardstick's factor meanwhile."""
    roles = server.roles()
    before = {pid: cpu_seconds(pid) for pid in roles}
    began = time.monotonic()
    factors = []
    while (elapsed := time.monotonic() - began) < seconds:
        factors.append(factor())
        time.sleep(min(1.0, max(0.0, seconds - elapsed)))
    used = {role: 100 * (cpu_seconds(pid) - before[pid]) / elapsed for pid, role in roles.items()}
    return used, statistics.median(factors)


if __name__ == "__main__":
    sys.exit(main())
