"""Lines on their way to a file that may be slow or full, without ever holding up who writes them.

Owns the buffer, its bound and the thread that empties it. Knows nothing of what the lines say.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from engine_core.errors import ConfigError
from engine_core.log import event

log = logging.getLogger("greenlane.worker")

BUFFER_BYTES = 4 << 20
INTERVAL_S = 0.25
CLOSE_S = 2.0
"""A disk that takes no more may not hold up the end of the process."""


class File(Protocol):
    """The part of `io.FileIO` that is used."""

    def write(self, data: bytes, /) -> int | None: ...
    def close(self) -> None: ...


def open_lines(path: Path) -> File:
    """The file, to be appended to at the start of a line: a former process may have died within one.

    Raises ConfigError when it can't be written.
    """
    try:
        file = io.FileIO(path, "a")
        if file.tell() > 0 and _last_byte(path) != b"\n":
            file.write(b"\n")
    except OSError as error:
        raise ConfigError(f"--step-log {path} can't be written: {error.strerror}") from error
    return file


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


class LineWriter:
    """Takes lines from one thread, writes them on another, several times a second while there are any.

    Lines beyond the buffer's bound are dropped; `dropped(count)` makes the line that says so. An error of the file ends
    the writing with one warning.
    """

    def __init__(self, file: File, dropped: Callable[[int], bytes], *, interval_s: float = INTERVAL_S) -> None:
        self._file = file
        self._dropped_line = dropped
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._size = 0
        self._dropped = 0
        self._filled = threading.Event()
        self._closing = threading.Event()
        self.ended = False
        """Nothing that comes is written any more."""
        self._thread = threading.Thread(target=self._run, name="step log", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Take one line, its end included; never waits for the file."""
        if self.ended:
            return
        with self._lock:
            if self._size + len(line) > BUFFER_BYTES:
                self._dropped += 1
                return
            self._lines.append(line)
            self._size += len(line)
        self._filled.set()

    def close(self) -> None:
        """Write what is left, waiting for the file a bounded time."""
        self._closing.set()
        self._filled.set()
        self._thread.join(CLOSE_S)
        self.ended = True

    def _run(self) -> None:
        while not self.ended:
            self._filled.wait()
            last = self._closing.wait(self._interval_s)
            self._filled.clear()
            try:
                self._write(self._take())
            except OSError as error:
                event(log, logging.WARNING, "step_log_ends", cause=str(error))
                self.ended = True
            if last:
                break
        self._file.close()

    def _take(self) -> bytes:
        with self._lock:
            lines, dropped = self._lines, self._dropped
            self._lines, self._size, self._dropped = [], 0, 0
        if dropped:
            lines.append(self._dropped_line(dropped))
        return b"".join(lines)

    def _write(self, data: bytes) -> None:
        """A raw file may take a part of it."""
        while data:
            data = data[self._file.write(data) or 0 :]
