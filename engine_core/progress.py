"""Start-up progress on stderr: one line that is rewritten on a terminal, a line every tenth elsewhere."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

TENTHS = 10


class Progress:
    """Shows `(what, done, total)` reports for people. Must be `finish`ed before other lines are written."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._rewrite = self._stream.isatty()
        self._shown: tuple[str, int] | None = None

    def show(self, what: str, done: int, total: int) -> None:
        """Report progress; units are the reporter's, `total` 0 means unknown."""
        parts = 100 if self._rewrite else TENTHS
        part = min(parts, done * parts // total) if total > 0 else 0
        if self._shown == (what, part):
            return
        if self._rewrite and self._shown is not None and self._shown[0] != what:
            self._write("\n")
        self._shown = (what, part)
        line = f"{what} {part * 100 // parts:3d} %" if total > 0 else what
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
