"""The demo after its installation: serve a model, ask it one question over gRPC, show what ran where, stop everything.

Owns nothing but the order of these steps; the server is `greenlane serve`, the client `greenlane chat`.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is run as a script

from scripts.serving import GREENLANE, ServeError, Serving, resident_bytes, start, stop

QUESTION = "What is the capital of France?"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description="Serve a small model and ask it a question.")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--model", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help="leave the server up and tell how to talk to it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped on the way out
    log = options.model.parent / "demo-server.log"
    print(f"==> starting frontend, engine core and worker (log: {log})", flush=True)
    try:
        server = start(options.model, log, ["--served-model-name", options.model.name])
        keep = False
        try:
            print(f"==> ready after {server.start_s:.1f} s\n\n> {options.question}\n", flush=True)
            answered = ask(server.grpc, options.question)
            print(summary(server))
            keep = options.keep and answered
        finally:
            if not keep:
                pids = list(server.roles())
                stop(server.process)
                print(stopped(pids))
        if keep:
            print(how_to_talk(server))
        return 0 if answered else 1
    except ServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def ask(address: str, question: str) -> bool:
    """Stream the answer to stdout, its figures to stderr; whether one came."""
    client = [*GREENLANE, "chat", question, "--address", address, "--temperature", "0", "--stats"]
    return subprocess.run(client, stdin=subprocess.DEVNULL).returncode == 0


def summary(server: Serving) -> str:
    """What ran where: one line a process."""
    info = server.ready["info"]
    lines = [f"\n{info['model']} ({info['architecture']}, {info['dtype']}) on {info['device']}"]
    for pid, role in server.roles().items():
        lines.append(f"  {role:<28} pid {pid:<8} {resident_bytes(pid) / (1 << 20):6.0f} MiB")
    lines.append(f"  HTTP {server.http} · text gRPC {server.grpc} · engine {server.engine}")
    return "\n".join(lines)


def stopped(pids: Sequence[int]) -> str:
    """What is left of the server's processes: nothing, or who."""
    left = [str(pid) for pid in pids if Path(f"/proc/{pid}").exists()]
    return f"==> still running: {', '.join(left)}" if left else f"==> stopped: all {len(pids)} processes have ended"


def how_to_talk(server: Serving) -> str:
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0, "stream": true}'
    call = (
        '{"chat": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}, "sampling": {"temperature": 0}}'
    )
    return "\n".join(
        [
            "\nThe server stays up. Talk to it:",
            f"  .venv/bin/greenlane chat --address {server.grpc} --temperature 0",
            f"  curl -N {server.http}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
            f"  grpcurl -plaintext -d '{call}' {server.grpc} greenlane.text.v1.Text/Generate",
            f"Stop it: kill {server.process.pid}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
