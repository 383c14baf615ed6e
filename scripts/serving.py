"""A running `greenlane serve` for scripts: started on free ports, its processes seen, stopped.

Owns no measurement and no client.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GREENLANE = [sys.executable, "-P", "-c", "from frontend.cli import main; main()"]
TINY = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "tiny-qwen3-austen"
"""The model that the tests use: 3.4 M parameters, words without sense."""
STOP_S = 40.0


class ServeError(Exception):
    """The server didn't start; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that is ready."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]
    """What it said when ready: http, grpc (lists), engine, pids by name, info."""
    start_s: float

    @property
    def http(self) -> str:
        return str(self.ready["http"][0])

    @property
    def grpc(self) -> str:
        return str(self.ready["grpc"][0])

    @property
    def engine(self) -> str:
        return str(self.ready["engine"])

    def roles(self) -> dict[int, str]:
        """pid → role of every process of this server, parents first."""
        names = {pid: name for name, pid in self.ready["pids"].items()} | {self.process.pid: "supervisor"}
        tree = process_tree(self.process.pid)
        return {pid: names.get(pid) or _child_of(names.get(parent, str(parent))) for pid, parent in tree}


def _child_of(parent: str) -> str:
    return f"{'templates' if parent.startswith('frontend') else 'worker'} of the {parent}"


def start(model: Path | str, log: Path, flags: Sequence[str] = ()) -> Serving:
    """Start a server in a session of its own, output to `log`, and wait until it is ready. Raises ServeError."""
    read_fd, write_fd = os.pipe()
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*GREENLANE, "serve", "--model", str(model), "--port=0", "--grpc-port=0", *flags, f"--ready-fd={write_fd}"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as pipe:
            line = pipe.readline()
        if not line:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise ServeError(f"the server didn't start; the end of {log}:\n{end}")
        return Serving(process, json.loads(line), time.monotonic() - began)
    except BaseException:
        stop(process)
        raise


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM twice: at once, since whoever stops a script's server waits for nothing."""
    for _ in range(2):
        if process.poll() is None:
            process.terminate()
            time.sleep(0.1)  # two pending signals of one kind would arrive as one
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def served(model: Path | str, log: Path, flags: Sequence[str] = ()) -> Iterator[Serving]:
    """`start`, and `stop` at the end, also when this script is asked to end by SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    serving = start(model, log, flags)
    try:
        yield serving
    finally:
        stop(serving.process)


# ------------------------------ processes


def process_tree(root: int) -> Iterator[tuple[int, int]]:
    """(pid, parent's pid) of a process and all below it, parents first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parents[int(stat.parent.name)] = int(_fields(stat)[1])
    waiting = [root] if root in parents else []
    while waiting:
        pid = waiting.pop(0)
        yield pid, parents[pid]
        waiting += sorted(child for child, parent in parents.items() if parent == pid)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _fields(stat: Path) -> list[str]:
    """The fields of /proc/PID/stat after the command name, which may hold anything."""
    return stat.read_text().rpartition(")")[2].split()
