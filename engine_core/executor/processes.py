"""Worker processes: spawned (never forked), watched through a pidfd, killed and reaped within bounds.

Owns the process, its control pipe and its file descriptors. Speaks no protocol and imports no worker code.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
MAX_FAREWELL_BYTES = 16 << 10
STDERR_FILENO = 2
IDLE_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
"""A worker's idle CPU threads spin for about a quarter of a millisecond, then sleep, unless whoever started the server
chose.

That is longer than the pauses between the parallel regions of a forward: threads that sleep in between pay for a
wake-up in each of hundreds (a decode row of a model of 135 M parameters on two quiet cores: 39 ms with 1,000 turns, 27
with 10,000, and no less with more). Each wait may last that long while another program holds a core, so more costs:
beside one busy program on the two cores a row has 15 tokens/s with 1,000 turns, 10 with 10,000, 6 with 30,000; with
OpenMP's default, 300,000, steps were fifty times slower."""

Command = Callable[[str, int], Sequence[str]]
"""(address to connect to, file descriptor of the control pipe) -> the command line of a worker."""


def worker_command(rank: int, log_level: str) -> Command:
    """The command line of this installation's own worker."""

    def build(address: str, control_fd: int) -> Sequence[str]:
        return [
            *(sys.executable, "-P", "-m", "engine_core", "worker"),
            *("--connect", address, "--rank", str(rank), "--control-fd", str(control_fd)),
            *("--parent-pid", str(os.getpid()), "--log-level", log_level),
        ]

    return build


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent dies; called first thing in a child.

    Exits at once when the parent is gone already.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def set_title(name: str) -> None:
    """The process's name in ps and top; at most 15 bytes."""
    _prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _prctl(option: int, argument: int | ctypes.c_char_p) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _environment() -> dict[str, str]:
    """Ours, with the idle threads' settings where it has none of them: half of each would be neither's choice."""
    chosen = any(name in os.environ for name in IDLE_THREADS)
    return dict(os.environ) if chosen else {**IDLE_THREADS, **os.environ}


class WorkerProcess:
    """One spawned worker. Must be spawned by a thread that outlives it: PR_SET_PDEATHSIG follows that thread."""

    def __init__(self, process: subprocess.Popen[bytes], control_fd: int) -> None:
        self._process = process
        self._control_fd = control_fd
        self.pidfd = os.pidfd_open(process.pid)
        """Readable once the process has ended."""

    @classmethod
    def spawn(cls, command: Command, address: str) -> WorkerProcess:
        """Start a worker in a process group of its own: a terminal's Ctrl-C is the core's to handle."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                command(address, write_fd),
                stdin=subprocess.DEVNULL,
                stdout=STDERR_FILENO,
                pass_fds=(write_fd,),
                process_group=0,
                env=_environment(),
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        os.set_blocking(read_fd, False)
        return cls(process, read_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended, reaped or not."""
        return self._process.returncode is not None or bool(select.select([self.pidfd], [], [], 0)[0])

    def kill(self) -> None:
        """SIGKILL, to this process and no later bearer of its number; works on a stopped process too."""
        if self._process.returncode is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, timeout: float) -> int | None:
        """Reap: the exit status (negative: the signal that killed it), or None when it outlives `timeout` seconds."""
        if self._process.returncode is None and not select.select([self.pidfd], [], [], timeout)[0]:
            return None
        return self._process.wait()

    def farewell(self) -> str:
        """What an aborting worker wrote to the control pipe, synchronously, before it died; empty when nothing."""
        pieces: list[bytes] = []
        size = 0
        while size < MAX_FAREWELL_BYTES:
            try:
                piece = os.read(self._control_fd, MAX_FAREWELL_BYTES - size)
            except BlockingIOError:
                break
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces).decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Release the descriptors; the process must have been reaped or given up."""
        os.close(self.pidfd)
        os.close(self._control_fd)


def describe_exit(status: int | None) -> str:
    """How a process ended, for people."""
    if status is None:
        return "doesn't end"
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"exited with status {status}"
