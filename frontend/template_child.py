"""The process in which chat templates run: requests on standard input, answers on standard output, one at a time.

Owns its own limits: memory, the length of a rendering, and not to outlive its parent. Knows no deadline; whoever waits
for an answer kills the process (`template_process.py`). Imports little, so that a killed one is soon replaced.

A frame is its length (4 bytes, big-endian) and JSON. The first frame in is the list of template sources, the first one
out an empty answer: ready. Each request is `[source index, variables, now]`, each answer `[what, text]`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, BinaryIO

import jinja2

from frontend.template_sandbox import build_environment

MAX_RENDERED_CHARS = 16 << 20
MAX_MEMORY_BYTES = 1 << 30
LENGTH_BYTES = 4
READY, RENDERED, REFUSED, TOO_LONG, FAILED = "ready", "rendered", "refused", "too long", "failed"
PR_SET_PDEATHSIG = 1


class Templates:
    """Compiled when first rendered: compiling computes constants, so it is under the deadline as well."""

    def __init__(self, sources: list[str]) -> None:
        self._sources = sources
        self._compiled: dict[int, jinja2.Template] = {}
        self._now = datetime.min
        self._environment = build_environment(lambda: self._now)

    def answer(self, index: int, variables: Mapping[str, Any], now: str) -> tuple[str, str]:
        """What came of a rendering: the text, or why there is none."""
        try:
            self._now = datetime.fromisoformat(now)
            return self._render(index, variables)
        except jinja2.TemplateError as error:
            return REFUSED, str(error)
        except Exception as error:  # a template may fail with anything, e.g. None + str
            return FAILED, type(error).__name__

    def _render(self, index: int, variables: Mapping[str, Any]) -> tuple[str, str]:
        template = self._compiled.get(index)
        if template is None:
            template = self._compiled[index] = self._environment.from_string(self._sources[index])
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                return TOO_LONG, ""
            pieces.append(piece)
        return RENDERED, "".join(pieces)


def main() -> None:
    """Answer until the parent closes the pipe. `sys.argv[1]` is the parent's pid."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        return
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sources = _read(requests)
    if sources is None:
        return
    templates = Templates(sources)
    _write(answers, (READY, ""))
    while (request := _read(requests)) is not None:
        _write(answers, templates.answer(*request))


def _read(stream: BinaryIO) -> Any:
    """The next frame; None at the end."""
    length = stream.read(LENGTH_BYTES)
    return json.loads(stream.read(int.from_bytes(length))) if length else None


def _write(stream: BinaryIO, answer: tuple[str, str]) -> None:
    data = json.dumps(answer).encode()
    stream.write(len(data).to_bytes(LENGTH_BYTES) + data)
    stream.flush()


if __name__ == "__main__":
    main()
