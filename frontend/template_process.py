"""Renders chat templates in a child process, within a deadline.

Owns the child: started with the first rendering, killed when an answer is late or can't be had, and started anew for
the next one. A template is code from a model folder, and there is no bounding what one built-in call does (a comparison
of lists that hold each other twice, forty levels deep, takes hours and the interpreter's lock). What runs in the child
is `template_child.py`'s; a rendering costs about 0.2 ms more than in this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from frontend.template_child import FAILED, LENGTH_BYTES, MAX_RENDERED_CHARS, REFUSED, RENDERED, TOO_LONG

RENDER_S = 3.0
"""A chat of 1,000 messages takes about 20 ms."""
STOOD_STILL = 0.1
"""A child that ran for less than this share of RENDER_S was kept from it: no template waits for anything."""
START_S = 30.0
PIECE_BYTES = 1 << 16


class RenderFailed(Exception):
    """There is no rendering; the message says why, for whoever sent the chat."""


class _Late(Exception):
    """The deadline has passed."""


class _Gone(Exception):
    """The child has ended, or stood still."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """What is to be rendered."""

    source: int
    """Index of the template."""
    variables: Mapping[str, Any]
    """JSON data."""
    now: str
    """ISO 8601, for `strftime_now`."""


class Renderer:
    """Renders some templates, one rendering at a time."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = list(sources)
        self._child: _Child | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat templates")
        """Of its own, so that whoever waits for the child holds no thread that others need. A rendering that nobody
        waits for any more still comes to its end there, before the next one begins."""

    def prepare(self) -> None:
        """Start the child, so that the first rendering needn't. Raises RenderFailed."""
        self._thread.submit(self._started).result()

    def _started(self) -> _Child:
        if self._child is None or self._child.ended:
            self._child = _Child(self._sources)
        return self._child

    async def render(self, rendering: Rendering) -> str:
        """The text. Raises RenderFailed."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._render, rendering)

    def _render(self, rendering: Rendering) -> str:
        request = msgspec.json.encode((rendering.source, rendering.variables, rendering.now))
        try:
            what, text = self._ask(request)
        except _Gone:  # perhaps over something else, such as a machine short of memory: twice is the chat's fault
            try:
                what, text = self._ask(request)
            except _Gone:
                raise RenderFailed(
                    "the chat can't be rendered: the process of the model's chat template ended, or stood still"
                ) from None
        if what != RENDERED:
            raise RenderFailed(_explained(what, text))
        return text

    def _ask(self, request: bytes) -> tuple[str, str]:
        """Raises RenderFailed when the answer is late, and _Gone."""
        child = self._started()
        had_run = child.ran_s()
        try:
            return child.ask(request, time.monotonic() + RENDER_S)
        except (_Late, _Gone) as error:
            stood_still = isinstance(error, _Late) and child.ran_s() - had_run < STOOD_STILL * RENDER_S
            self._child = None
            child.end()
            if stood_still or isinstance(error, _Gone):
                raise _Gone from None
            raise RenderFailed(
                f"the chat can't be rendered: the model's chat template took longer than {RENDER_S:g} s"
            ) from None


def _explained(what: str, text: str) -> str:
    if what == REFUSED:
        return f"the model's chat template refuses this chat: {text}"
    if what == TOO_LONG:
        return f"the chat can't be rendered: the prompt would be longer than {MAX_RENDERED_CHARS} characters"
    assert what == FAILED
    return f"the model's chat template failed on this chat ({text}); check roles and contents"


class _Child:
    """One child process, from its start to its end."""

    def __init__(self, sources: list[str]) -> None:
        """Raises RenderFailed when it doesn't start."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "frontend.template_child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback may hold what a chat said
            bufsize=0,
            process_group=0,  # a terminal's Ctrl-C is the supervisor's to handle
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        for pipe in (self._in, self._out):
            os.set_blocking(pipe.fileno(), False)
        self._end = weakref.finalize(self, _end, self._process)
        try:
            self.ask(json.dumps(sources).encode(), time.monotonic() + START_S)
        except (_Late, _Gone):
            self.end()
            raise RenderFailed("the process that renders chat templates doesn't start") from None

    @property
    def ended(self) -> bool:
        """Whether it has died while nobody asked it anything."""
        return self._process.poll() is not None

    def ran_s(self) -> float:
        """Seconds of CPU time so far."""
        times = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")

    def ask(self, request: bytes, deadline: float) -> tuple[str, str]:
        """Send a frame, take the answer. Raises _Late or _Gone; the child is of no use then."""
        left = memoryview(len(request).to_bytes(LENGTH_BYTES) + request)
        while left:
            _await(self._in, select.POLLOUT, deadline)
            try:
                left = left[self._in.write(left[:PIECE_BYTES]) or 0 :]
            except BrokenPipeError:
                raise _Gone from None
        length = int.from_bytes(self._take(LENGTH_BYTES, deadline))
        what, text = json.loads(self._take(length, deadline))
        return what, text

    def _take(self, size: int, deadline: float) -> bytes:
        pieces: list[bytes] = []
        while size:
            _await(self._out, select.POLLIN, deadline)
            piece = self._out.read(min(size, PIECE_BYTES))
            if not piece:
                raise _Gone
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def end(self) -> None:
        """Kill it. Happens by itself when nobody refers to it any more, and at this process's exit."""
        self._end()


def _await(pipe: IO[bytes], events: int, deadline: float) -> None:
    poller = select.poll()  # select() takes no descriptor beyond 1023
    poller.register(pipe, events)
    if not poller.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
        raise _Late


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
