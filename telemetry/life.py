"""Signs of life: what a process gives to whoever started it, and what is read from them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time

BEAT_S = 1.0
LIFE = struct.Struct("<d")
"""A sign: when it was given, in seconds of the monotonic clock, which all processes of a machine share."""


def show_life(alive_fd: int, loop: asyncio.AbstractEventLoop) -> None:
    """One sign a second for as long as the loop turns. The descriptor mustn't block.

    Whoever started this process looks now and then, and kills it where the latest is old. A callback: a task that
    sleeps costs nearly twice as much, and an idle server does little else.
    """
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        with contextlib.suppress(BlockingIOError):  # nobody listens at the moment
            os.write(alive_fd, LIFE.pack(time.monotonic()))
        loop.call_later(BEAT_S, show_life, alive_fd, loop)
