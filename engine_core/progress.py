"""Start-up progress on stderr: one line that is rewritten on a terminal, a line every tenth elsewhere; what each stage
took stands at its end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TextIO

TENTHS = 10


class Progress:
    """Shows `(what, done, total)` reports for people. Must be `finish`ed before other lines are written."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._stream = sys.stderr if stream is None else stream
        self._rewrite = self._stream.isatty()
        self._shown: tuple[str, int] | None = None
        self._began = 0.0

    def show(self, what: str, done: int, total: int) -> None:
        """Report progress; units are the reporter's, `total` 0 means unknown."""
        parts = 100 if self._rewrite else TENTHS
        part = min(parts, done * parts // total) if total > 0 else 0
        if self._shown == (what, part):
            return
        if self._shown is None or self._shown[0] != what:
            self._began = self._now()
            if self._rewrite and self._shown is not None:
                self._write("\n")
        self._shown = (what, part)
        line = f"{what} {part * 100 // parts:3d} %" if total > 0 else what
        if total > 0 and part == parts:
            line += f", {self._now() - self._began:.1f} s"
        self._write(f"\r{line}" if self._rewrite else f"{line}\n")

    def finish(self) -> None:
        """End the line that is being rewritten."""
        if self._rewrite and self._shown is not None:
            self._write("\n")
        self._shown = None

    def _write(self, text: str) -> None:
        """A reader that is gone is no reason to stop loading."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
