"""The process in which grammars are tried: requests on standard input, answers on standard output, one at a time.

Owns its own limits: what memory a grammar may take, and not to outlive its parent. Knows no deadline; whoever waits for
an answer kills the process (`grammar_check.py`). A grammar that recurses or allocates without bound ends it, and
nothing else.

A frame is its length (4 bytes, big-endian) and JSON. The first frame in is `[tokenizer file, vocabulary size, eos
ids]`, the first one out null: ready. Each request is `[kind, text]`, each answer why there is no such grammar, or null.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path
from typing import Any, BinaryIO

from engine_core.executor.processes import die_with_parent
from engine_core.worker.grammar import GrammarError, Vocabulary, start_deep_thread

MAX_GRAMMAR_MEMORY = 64 << 20
LENGTH_BYTES = 4


def main() -> None:
    """Answer until the parent closes the pipe. `sys.argv[1]` is the parent's pid."""
    die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    start_deep_thread("grammars", _serve).join()


def _serve() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    opening = _read(requests)
    if opening is None:
        return
    vocabulary = Vocabulary(*opening)
    vocabulary.matcher("regex", "ready")
    _write(answers, None)
    while (request := _read(requests)) is not None:
        most = _data_bytes() + MAX_GRAMMAR_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
        _write(answers, _complaint(vocabulary, *request))


def _complaint(vocabulary: Vocabulary, kind: str, text: str) -> str | None:
    try:
        vocabulary.matcher(kind, text)
    except GrammarError as error:
        return str(error)
    except MemoryError:
        return f"it takes more than {MAX_GRAMMAR_MEMORY >> 20} MiB"
    return None


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process now."""
    match = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


def _read(stream: BinaryIO) -> Any:
    """The next frame; None at the end."""
    length = stream.read(LENGTH_BYTES)
    return json.loads(stream.read(int.from_bytes(length))) if length else None


def _write(stream: BinaryIO, answer: str | None) -> None:
    data = json.dumps(answer).encode()
    stream.write(len(data).to_bytes(LENGTH_BYTES) + data)
    stream.flush()


if __name__ == "__main__":
    main()
