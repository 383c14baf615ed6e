"""The end of what a process says."""

from __future__ import annotations

import os
import sys


def flush_or_forget() -> None:
    """Flush standard output and error. That nobody reads them any more is no reason to end with another status, which
    it would be when the interpreter flushes them at the end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
