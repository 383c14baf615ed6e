"""The demo after its installation: serve a model, ask it one question over gRPC, show what ran where, stop everything.

Owns nothing but the order of these steps; the server is `greenlane serve`, the client `greenlane chat`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GREENLANE = [sys.executable, "-P", "-c", "from frontend.cli import main; main()"]
QUESTION = "What is the capital of France?"
START_S = 300.0
STOP_S = 40.0


class DemoError(Exception):
    """The demo can't go on; the message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo.sh", description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--model", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help="leave the server up and tell how to talk to it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped on the way out
    try:
        with served(options.model, options.model.parent / "demo-server.log", keep=options.keep) as (server, ready):
            print(f"\n> {options.question}\n", flush=True)
            ask(ready["grpc"][0], options.question)
            print(summary(server.pid, ready))
            if options.keep:
                print(how_to_talk(server.pid, ready))
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


@contextlib.contextmanager
def served(model: Path, log: Path, *, keep: bool) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A running `greenlane serve` on free ports and what it said when ready; stopped at the end, unless kept."""
    read_fd, write_fd = os.pipe()
    flags = ["--model", str(model), "--served-model-name", model.name, "--port", "0", "--grpc-port", "0"]
    began = time.monotonic()
    print(f"==> starting frontend, engine core and worker (log: {log})", flush=True)
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*GREENLANE, "serve", *flags, "--ready-fd", str(write_fd)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    os.close(write_fd)
    failed = True
    try:
        with os.fdopen(read_fd) as pipe:
            line = pipe.readline()
        if not line:
            raise DemoError(f"the server didn't start; the end of {log}:\n{tail(log)}")
        print(f"==> ready after {time.monotonic() - began:.1f} s", flush=True)
        yield server, json.loads(line)
        failed = False
    finally:
        if failed or not keep:
            stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Twice SIGTERM stops at once; nothing is open any more."""
    for _ in range(2):
        if server.poll() is None:
            server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def ask(address: str, question: str) -> None:
    """Stream the answer to stdout, its figures to stderr."""
    client = [*GREENLANE, "chat", question, "--address", address, "--temperature", "0", "--stats"]
    if subprocess.run(client, stdin=subprocess.DEVNULL).returncode != 0:
        raise DemoError("the question got no answer")


# ------------------------------ what ran where


def summary(supervisor: int, ready: dict[str, Any]) -> str:
    """One line a process: role, pid, resident memory."""
    roles = {pid: name for name, pid in ready["pids"].items()}
    lines = [f"\nmodel {ready['info'].get('model', '')} on {ready['info'].get('device', '')}"]
    for pid, parent in process_tree(supervisor):
        role = "supervisor" if pid == supervisor else roles.get(pid) or f"worker of the {roles.get(parent, parent)}"
        lines.append(f"  {role:<28} pid {pid:<8} {resident_mib(pid):6.0f} MiB")
    lines.append(f"  HTTP {' '.join(ready['http'])} · text gRPC {' '.join(ready['grpc'])} · engine {ready['engine']}")
    return "\n".join(lines)


def process_tree(root: int) -> Iterator[tuple[int, int]]:
    """(pid, parent's pid) of a process and all below it, parents first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    known, waiting = {root}, [root]
    while waiting:
        pid = waiting.pop(0)
        yield pid, parents[pid]
        waiting += sorted(child for child, parent in parents.items() if parent == pid and child not in known)
        known.update(waiting)


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def how_to_talk(supervisor: int, ready: dict[str, Any]) -> str:
    http, grpc = ready["http"][0], ready["grpc"][0]
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'
    call = '{"chat": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}}'
    return "\n".join(
        [
            "\nThe server stays up. Talk to it:",
            f"  .venv/bin/greenlane chat --address {grpc}",
            f"  curl -N {http}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
            f"  grpcurl -plaintext -d '{call}' {grpc} greenlane.text.v1.Text/Generate",
            f"Stop it: kill {supervisor}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
