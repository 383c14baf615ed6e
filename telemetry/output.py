"""What a process says on standard output and error: that nobody reads it any more is no reason to stop, or to end with
another status, which it would be when the interpreter flushes at the end."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def tell(stream: TextIO, text: str) -> None:
    """Write and flush, or from now on forget what the stream is given."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def flush_or_forget() -> None:
    """Before a process ends."""
    for stream in (sys.stdout, sys.stderr):
        tell(stream, "")
