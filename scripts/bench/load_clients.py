"""Streaming HTTP clients in processes of their own, so that no client is what a front's measurement measures.

Owns the processes and their agreement: all streams have begun before the window opens, and end after it has closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import uvloop

from scripts.bench.http_streams import Answer, HttpStreams

PROMPT_TOKENS = 16
FIRST_S = 60.0
"""For every stream to begin."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one process asks for."""

    url: str
    model: str
    streams: int
    n: int
    """Sequences of each stream."""
    tokens: int
    """Of each sequence; more than the window takes."""
    cpus: Sequence[int]


@dataclass(frozen=True, slots=True)
class Count:
    """What came in the window."""

    events: int
    tokens: int
    """With n = 1; else 0."""
    seconds: float
    cpu_s: float
    """Of the client."""


@contextlib.contextmanager
def clients(loads: Sequence[Load]) -> Iterator[list[Connection]]:
    """A process for each load, streaming by now; each takes a window's (begin, end), of time.monotonic, for a Count."""
    spawn = multiprocessing.get_context("spawn")
    pairs = [spawn.Pipe() for _ in loads]
    processes = [
        spawn.Process(target=_run, args=(theirs, load)) for (_, theirs), load in zip(pairs, loads, strict=True)
    ]
    for process in processes:
        process.start()
    ours = [pipe for pipe, _ in pairs]
    for _, theirs in pairs:
        theirs.close()
    try:
        for pipe in ours:
            pipe.recv()
        yield ours
    finally:
        for pipe in ours:
            pipe.close()
        for process in processes:
            process.join()


def _run(pipe: Connection, load: Load) -> None:
    os.sched_setaffinity(0, load.cpus)
    gc.freeze()
    uvloop.run(_stream(pipe, load))


async def _stream(pipe: Connection, load: Load) -> None:
    streams = HttpStreams(load.url, load.model)
    prompt = [5 + at for at in range(PROMPT_TOKENS)]
    answers = [await streams.open(prompt, load.tokens, load.n) for _ in range(load.streams)]
    async with asyncio.timeout(FIRST_S):
        await asyncio.gather(*(answer.begun for answer in answers))
    pipe.send(None)
    try:
        begin, end = await asyncio.to_thread(pipe.recv)
        before = await _at(begin, answers)
        after = await _at(end, answers)
        if any(answer.done.done() for answer in answers):
            raise RuntimeError(f"an answer of {load.tokens} tokens ended before the window did")
        events, tokens, seconds, cpu = (late - early for early, late in zip(before, after, strict=True))
        pipe.send(Count(int(events), int(tokens), seconds, cpu))
        await asyncio.to_thread(pipe.poll, None)
    finally:
        for answer in answers:
            answer.leave()


async def _at(when: float, answers: Sequence[Answer]) -> tuple[int, int, float, float]:
    """Events, tokens, time and CPU time at that time."""
    await asyncio.sleep(when - time.monotonic())
    events, tokens = sum(answer.events for answer in answers), sum(answer.tokens for answer in answers)
    return events, tokens, time.monotonic(), time.process_time()
