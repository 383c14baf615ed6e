"""Which process runs on which cores, and how much of them it used.

Owns placement by affinity and CPU time to the nanosecond. Two hardware threads of one core count as one place for
whoever must not be disturbed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def available() -> list[int]:
    """This process's CPUs: one of each core, then their siblings."""
    cpus = sorted(os.sched_getaffinity(0))
    seen: set[str] = set()
    first: list[int] = []
    for cpu in cpus:
        try:
            core = Path(SIBLINGS.format(cpu)).read_text()
        except OSError:  # nobody says; each for itself
            core = str(cpu)
        if core not in seen:
            seen.add(core)
            first.append(cpu)
    return first + [cpu for cpu in cpus if cpu not in first]


def pin(pid: int, cpus: Collection[int]) -> None:
    """Every thread of a process."""
    for task in _tasks(pid):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(task.name), cpus)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process's living threads."""
    total = 0
    for task in _tasks(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int((task / "schedstat").read_text().split()[0])
    return 1e-9 * total


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())
