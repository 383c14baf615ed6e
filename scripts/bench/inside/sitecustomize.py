"""What benches need inside a server's processes: stamps of what passed where and when, and a pace for the fake device.

Python imports this module by its name in every process that `entered` lets start with its folder on PYTHONPATH. Stamps
wrap methods of the engine core and of the frontend, all but one of which run once a step, and append what they note to
a file of the process; a pace lets the worker's steps end no sooner than it says. The product's files stay as they are.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import mmap
import os
import struct
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = "GREENLANE_BENCH_STAMPS"
"""The folder for stamps; without it there are none."""
PACE = "GREENLANE_BENCH_PACE"
"""A file that holds the shortest time of a step, SECONDS; without it there is none."""
BUFFER_BYTES = 1 << 20
SECONDS = struct.Struct("<d")
HEAD = struct.Struct("<cdI")
"""Kind, seconds of the monotonic clock (one for all processes), bytes that follow.

Kinds: `l` a request's number and label, `c` committed, `s` sent and `r` received: a number for each token; `w` written:
a number and its count of tokens for each event."""


@contextlib.contextmanager
def entered(**variables: Path) -> Iterator[None]:
    """Processes started in this context import this module, and find these variables."""
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), before.get("PYTHONPATH", "")])
    os.environ.update({name: str(path) for name, path in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class StampFile:
    """This process's records, written when there are many, and at its end: a write each would slow what is measured."""

    def __init__(self) -> None:
        path = os.path.join(os.environ[FOLDER], f"{os.getpid()}.stamps")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._records = bytearray()
        atexit.register(self.flush)

    def add(self, kind: bytes, data: bytes, now: float) -> None:
        if data:
            self._records += HEAD.pack(kind, now, len(data)) + data
            if len(self._records) > BUFFER_BYTES:
                self.flush()

    def flush(self) -> None:
        records, self._records = self._records, bytearray()  # other threads go on adding
        os.write(self._file, records)


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

    plain_read = SequenceText.read

    def read(text: SequenceText, sequence: Any) -> Any:
        deltas = plain_read(text, sequence)
        # Whatever a turn writes is with the kernel when it is over: the first callback of the next knows when.
        if not events:
            asyncio.get_running_loop().call_soon(written)
        events.extend((sequence.number, text.token_count))
        return deltas

    def written() -> None:
        stamps.add(b"w", events.tobytes(), time.monotonic())
        del events[:]

    around(Session, "receive", lambda *_: None, received)
    around(Session, "add", added)
    setattr(SequenceText, "read", read)  # noqa: B010  # once an event: `around` would cost too much


def in_worker() -> None:
    from engine_core.device.fake import FakeCompute

    with open(os.environ[PACE], "rb") as file:
        pace = mmap.mmap(file.fileno(), SECONDS.size, prot=mmap.PROT_READ)
    ended = 0.0

    def wait(*_: Any) -> None:
        nonlocal ended
        now = time.monotonic()
        due = ended + SECONDS.unpack(pace)[0]
        time.sleep(max(0.0, due - now))
        ended = max(due, now)

    around(FakeCompute, "read", wait)


modules = {module for flag, module in itertools.pairwise(sys.orig_argv) if flag == "-m"}
if FOLDER in os.environ and "engine_core" in modules and "engine" in sys.orig_argv:
    in_engine_core(StampFile())
elif FOLDER in os.environ and "frontend" in modules:
    in_frontend(StampFile())
elif PACE in os.environ and "engine_core" in modules and "worker" in sys.orig_argv:
    in_worker()
