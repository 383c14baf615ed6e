"""Tries a grammar in a child process, within a deadline, before this process takes it.

Owns the child: started with the first grammar, killed when an answer is late or can't be had, and started anew for the
next one. What runs in it is `grammar_child.py`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from typing import IO

from engine_core.worker.grammar import GrammarError
from engine_core.worker.grammar_child import LENGTH_BYTES

CHECK_S = 3.0
"""The largest schema that a request can hold takes about half a second."""
START_S = 30.0
PIECE_BYTES = 1 << 16


class GrammarLate(GrammarError):
    """A grammar that wasn't compiled in the time it had."""


class _Late(Exception):
    """The deadline has passed."""


class _Gone(Exception):
    """The child has ended."""


class GrammarCheck:
    """One grammar at a time, all from one thread, which must live as long as the process: so does the child."""

    def __init__(self, tokenizer_file: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._opening = (tokenizer_file, vocab_size, eos_token_ids)
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, kind: str, text: str, within: float = CHECK_S) -> None:
        """Raises GrammarError for a grammar that can't be compiled within bounds: GrammarLate after so many seconds."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        try:
            if self._process is None:
                self._process = self._start()
            complaint = _ask(self._process, (kind, text), time.monotonic() + within)
        except _Late:
            self.close()
            raise GrammarLate(f"it wasn't compiled within {within:g} s") from None
        except _Gone:
            self.close()
            raise GrammarError("it is too large or too deeply nested to be compiled") from None
        if complaint is not None:
            raise GrammarError(complaint)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine_core.worker.grammar_child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a complaint may quote the grammar
            bufsize=0,
            process_group=0,
        )
        for pipe in _pipes(process):
            os.set_blocking(pipe.fileno(), False)
        self._process = process
        try:
            _ask(process, self._opening, time.monotonic() + START_S)
        except (_Late, _Gone):
            self.close()
            raise GrammarError("the process that tries grammars doesn't start") from None
        return process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in _pipes(process):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _ask(process: subprocess.Popen[bytes], request: object, deadline: float) -> str | None:
    """Send a frame, take the answer. Raises _Late or _Gone; the child is of no use then."""
    into, out_of = _pipes(process)
    data = json.dumps(request).encode()
    left = memoryview(len(data).to_bytes(LENGTH_BYTES) + data)
    while left:
        _await(into, select.POLLOUT, deadline)
        try:
            left = left[into.write(left[:PIECE_BYTES]) or 0 :]
        except BrokenPipeError:
            raise _Gone from None
    answer: str | None = json.loads(_take(out_of, int.from_bytes(_take(out_of, LENGTH_BYTES, deadline)), deadline))
    return answer


def _take(pipe: IO[bytes], size: int, deadline: float) -> bytes:
    pieces: list[bytes] = []
    while size:
        _await(pipe, select.POLLIN, deadline)
        piece = pipe.read(min(size, PIECE_BYTES))
        if not piece:
            raise _Gone
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _await(pipe: IO[bytes], events: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(pipe, events)
    if not poller.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
        raise _Late
