"""Files whose content may change while a server runs: read again when they did, so that keys rotate without a restart.

Owns the question whether a file changed (its identity, size and times, at the price of one stat a file), and nothing of
what stands in it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from access.policy import AccessError

MAX_BYTES = 1 << 20


class FreshFiles:
    """Some files that belong together."""

    def __init__(self, named: Sequence[tuple[str, str]]) -> None:
        """`named`: the flag that a path came with, and the path."""
        self._named = tuple(named)
        self._seen: tuple[tuple[int, ...] | None, ...] = ()

    def changed(self) -> bool:
        """Whether any of them changed since the latest call; a missing file counts as one more content."""
        seen = tuple(_signature(path) for _, path in self._named)
        changed = seen != self._seen
        self._seen = seen
        return changed

    def read(self) -> list[bytes]:
        """The contents. Raises AccessError naming the flag of one that can't be read."""
        return [_read(flag, Path(path)) for flag, path in self._named]


def _signature(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _read(flag: str, path: Path) -> bytes:
    try:
        # a named pipe would hold up the whole process until somebody writes to it
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise AccessError(f"{flag} {path} is no regular file")
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise AccessError(f"{flag} {path} can't be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise AccessError(f"{flag} {path} is larger than {MAX_BYTES} bytes")
    return content
