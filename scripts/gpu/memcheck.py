"""A short serve in `green` whose worker runs under compute-sanitizer's memcheck: no kernel may make a bad access.

The worker is started by hand beside its engine core, as on another machine, so that nobody kills it before its summary
is written. The sanitizer slows kernels many times over: the server is small and its bounds are wide.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from scripts.gpu.options import Options, parse_mode, server_flags

MODE = "green-48-128"
SMALL = ("--max-num-seqs=4", "--kv-cache-memory=64MiB", "--gpu-wait-timeout=120", "--worker-timeout=120")
REQUESTS = 3
PROMPT, TOKENS = 300, 24
DECODED = 400
"""Tokens of the request that decodes beside the others' prefills."""
GUARD_S = 300.0
STOP_S = 60.0
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
PROBE = re.compile(r"Program hit .* on CUDA API call to cuGetProcAddress")
"""cuda-python asks the driver for entry points that it may not have, and takes no for an answer: no bad access."""
PYTHON = (sys.executable, "-P", "-m")


def run(options: Options) -> dict[str, Any]:
    report = options.work / "memcheck.report"
    report.unlink(missing_ok=True)
    flags = [*server_flags(options, parse_mode(MODE)), *SMALL]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        sockets, port = Path(folder), free_port()
        watched = [sanitizer(), "--tool", "memcheck", "--log-file", str(report)] if options.on_gpu else []
        engine = [*PYTHON, "engine_core", "engine", f"--model={options.model()}", *flags]
        engine += [f"--address=unix:{sockets / 'engine.sock'}", f"--worker-address=unix:{sockets / 'worker.sock'}"]
        worker = [*watched, *PYTHON, "engine_core", "worker", f"--connect=ipc://{sockets / 'worker.sock'}"]
        frontend = [
            *PYTHON,
            "frontend",
            f"--model={options.model()}",
            f"--engine-address=unix:{sockets / 'engine.sock'}",
        ]
        frontend += [f"--port={port}", "--grpc-port=0", "--engine-timeout=60"]
        log = running.enter_context((options.work / "memcheck.log").open("wb"))
        sanitized = running.enter_context(started(worker, log, asked=False))
        running.enter_context(started(engine, log))
        running.enter_context(started(frontend, log))
        began = time.monotonic()
        http = running.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=GUARD_S, trust_env=False)
        )
        wait_until_ready(http, sanitized)
        start_s = time.monotonic() - began
        completed = complete_some(http)
    said = report.read_text(errors="replace") if report.exists() else ""
    summary, probes = SUMMARY.search(said), len(PROBE.findall(said))
    errors = int(summary[1]) - probes if summary else None
    measured = {
        "flags": flags,
        "start_s": round(start_s, 1),
        "requests": REQUESTS,
        "completed": completed,
        "worker_status": sanitized.returncode,
        "errors": errors,
        "probed_entry_points": probes,
        "report": said.splitlines()[:40] if errors else [],
    }
    return {**measured, "broken": broken(measured, options)}


def sanitizer() -> str:
    """Its path: CUDA's folder need not be on PATH."""
    return shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def broken(measured: dict[str, Any], options: Options) -> list[str]:
    checks = {
        "a request didn't complete": measured["completed"] == measured["requests"],
        "the worker didn't leave in peace": measured["worker_status"] == 0,
        "memcheck reports errors, or nothing": measured["errors"] == 0 or not options.on_gpu,
    }
    return [what for what, held in checks.items() if not held]


def complete_some(http: httpx.Client) -> int:
    """One prompt after the other beside a decoder, so that prefills overlap decode; how many completed."""
    model = http.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    decoded = {**body, "prompt": [11] * 8, "max_tokens": DECODED, "stream": True}
    with http.stream("POST", "/v1/completions", json=decoded) as decoder:
        lines = decoder.iter_lines()
        next(lines)
        prompts = [list(range(10 + number, 10 + number + PROMPT)) for number in range(REQUESTS)]
        answers = [http.post("/v1/completions", json={**body, "prompt": prompt}).json() for prompt in prompts]
        for _ in lines:
            pass
    return sum(answer.get("usage", {}).get("completion_tokens") == TOKENS for answer in answers)


# ------------------------------ the processes


@contextlib.contextmanager
def started(command: list[str], log: Any, *, asked: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """A process, and at the end its peaceful leave: by SIGTERM, or because its peer has left (`asked` False)."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if asked:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(http: httpx.Client, worker: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError when the worker ends or takes too long."""
    deadline = time.monotonic() + GUARD_S
    while time.monotonic() < deadline and worker.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"not serving within {GUARD_S:g} s (the worker's exit status: {worker.poll()})")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
