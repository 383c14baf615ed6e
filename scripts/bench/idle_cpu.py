"""CPU that an idle server uses: every process of `greenlane serve` over 30 s, once it has answered and gone quiet.

Prints a table, then one JSON line: `idle_core_pct` is the percentage of one core that the whole tree used.

    python scripts/bench/idle_cpu.py [--model FOLDER] [--seconds 30]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is run as a script

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
        used = measure(server, options.seconds)
    total = sum(used.values())
    for role, percent in used.items():
        print(f"{role:<28} {percent:6.3f} %")
    print(f"{'all':<28} {total:6.3f} %")
    result = {"idle_core_pct": round(total, 4), "seconds": options.seconds, "by_role": used}
    print(json.dumps(result))
    return 0


def complete(server: Serving) -> None:
    """One request, so that whatever a first request starts has been started."""
    body = json.dumps({"model": server.ready["info"]["model"], "prompt": "Once", "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{server.http}/v1/completions", body, {"content-type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        response.read()


def measure(server: Serving, seconds: float) -> dict[str, float]:
    """Per cent of a core by role, over that many seconds."""
    roles = server.roles()
    before = {pid: cpu_seconds(pid) for pid in roles}
    began = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    return {role: 100 * (cpu_seconds(pid) - before[pid]) / elapsed for pid, role in roles.items()}


if __name__ == "__main__":
    sys.exit(main())
