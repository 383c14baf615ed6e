"""Stamps in the processes of a server that `event_ages.stamping` has started: what passed where, and when.

Python imports this module by its name, since its folder is on PYTHONPATH. Wraps methods of the engine core and of the
frontend, all but one of which run once a step; what they note is appended to a file of the process. The product's
files stay as they are.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import struct
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

FOLDER = "GREENLANE_BENCH_STAMPS"
HEAD = struct.Struct("<cdI")
"""Kind, seconds of the monotonic clock (one for all processes), bytes that follow.

Kinds: `l` a request's number and label, `c` committed, `s` sent and `r` received: a number for each token; `w` written:
a number and its count of tokens for each event."""


class StampFile:
    """This process's records, written through at once."""

    def __init__(self) -> None:
        path = os.path.join(os.environ[FOLDER], f"{os.getpid()}.stamps")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, kind: bytes, data: bytes, now: float) -> None:
        if data:
            os.write(self._file, HEAD.pack(kind, now, len(data)) + data)


def around(owner: Any, name: str, after: Callable[..., None], before: Callable[..., None] | None = None) -> None:
    """Call `before(*arguments)` and `after(result, *arguments)` around a method."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*arguments: Any) -> Any:
        if before is not None:
            before(*arguments)
        result = method(*arguments)
        after(result, *arguments)
        return result

    setattr(owner, name, wrapped)


def in_engine_core(stamps: StampFile) -> None:
    from engine_core.outbox import Outbox
    from engine_core.scheduling.outputs import OutputBuffer

    def committed(outputs: Any, *_: Any) -> None:
        now = time.monotonic()
        for output in outputs:
            if len(output.numbers):
                stamps.add(b"c", output.numbers.astype("<u8").tobytes(), now)

    def sent(message: Any, *_: Any) -> None:
        if message is not None:
            stamps.add(b"s", message.numbers, time.monotonic())

    around(OutputBuffer, "take", committed)
    around(Outbox, "take", sent)


def in_frontend(stamps: StampFile) -> None:
    from frontend.generate import SequenceText
    from frontend.session import Session

    events = array("Q")
    """Numbers and token counts of the events that this turn of the loop writes."""

    def received(_: Any, message: Any) -> None:
        stamps.add(b"r", message.output.numbers, time.monotonic())

    def added(stream: Any, _: Any, add: Any) -> None:
        stamps.add(b"l", struct.pack("<Q", stream.number) + add.label.encode(), time.monotonic())

    def read(_: Any, text: Any, sequence: Any) -> None:
        # uvloop hands a turn's writes to the kernel when the turn is over: the first callback of the next knows when.
        if not events:
            asyncio.get_running_loop().call_soon(written)
        events.extend((sequence.number, text.token_count))

    def written() -> None:
        stamps.add(b"w", events.tobytes(), time.monotonic())
        del events[:]

    around(Session, "receive", lambda *_: None, received)
    around(Session, "add", added)
    around(SequenceText, "read", read)


if FOLDER in os.environ:
    modules = {module for flag, module in itertools.pairwise(sys.orig_argv) if flag == "-m"}
    if "engine_core" in modules and "engine" in sys.orig_argv:
        in_engine_core(StampFile())
    elif "frontend" in modules:
        in_frontend(StampFile())
