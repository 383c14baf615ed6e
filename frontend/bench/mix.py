"""Decode pace under prefill: streaming decoders run while cold prompts arrive at a fixed rate.

Owns the load and its figures. A gap is the time between two events of one stream; tokens are counted from the usage in
the events, so that a server can't look faster by sending several at once. Prompts are token ids: no tokenizer's time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from frontend.bench.client import BenchError, Target

FIRST_EVENTS = 50
"""Every decoder has sent so many events before anything is measured."""
DECODER_PROMPT = 128
POLL_S = 0.01
Tell = Callable[[str, float], None]
"""Called with what is going on (a phase's name, or "starting") and how much of it is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Mix:
    """One load."""

    model: str
    vocabulary: int
    """Prompts are drawn from ids below it."""
    decoders: int
    output: int
    """Tokens of each decoder: more than it gets to while it is measured."""
    inject_len: int
    qps: float
    """Injected prompts a second; 0: none."""
    n: int
    """Injected prompts."""
    seconds: float
    """Measured time without injection."""
    seed: int = 0


Events = list[tuple[float, int]]
"""(arrival, tokens in the event)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    sent: float
    first: float
    """When its first token came."""


@dataclass(slots=True)
class Phase:
    """A measured stretch of time: all events of the decoders until its end, and the prompts injected in it."""

    name: str
    rows: list[Events]
    began: float
    ended: float = 0.0
    prompts: list[Prompt] = field(default_factory=list)
    alive: int = 0
    """Decoders that were still at it at the end."""


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Run:
    """One load on one server."""

    def __init__(self, target: Target, mix: Mix, tell: Tell) -> None:
        self._target = target
        self._mix = mix
        self._tell = tell
        self._random = random.Random(mix.seed)
        self._rows: list[Events] = [[] for _ in range(mix.decoders)]
        self._decoders: list[asyncio.Task[float]] = []
        self._prompts: list[bytes] = []
        """Requests with the prompts to be injected, made beforehand: that takes some ms each, for which no event could
        be received."""

    async def measure(self, names: Sequence[str]) -> list[Phase]:
        """Start the decoders and measure these phases, "undisturbed" or "injected", one after the other.

        Raises BenchError when the server refuses or fails.
        """
        injected: list[asyncio.Task[Prompt]] = []
        mix = self._mix
        decoders = [self._body(DECODER_PROMPT, mix.output) for _ in self._rows]
        self._prompts = [self._body(mix.inject_len, 1) for _ in range(mix.n if "injected" in names else 0)]
        try:
            self._decoders = [
                asyncio.create_task(self._stream(body, row)) for body, row in zip(decoders, self._rows, strict=True)
            ]
            await self._started()
            return [await self._phase(name, injected) for name in names]
        finally:
            tasks = [*self._decoders, *injected]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _started(self) -> None:
        while (least := min(len(row) for row in self._rows)) < FIRST_EVENTS:
            self._tell("starting", least / FIRST_EVENTS)
            _check(self._decoders)
            if all(decoder.done() for decoder in self._decoders):
                raise BenchError(f"a decoder ended after {least} events: let them run longer with --out")
            await asyncio.sleep(POLL_S)
        self._tell("starting", 1.0)

    async def _phase(self, name: str, injected: list[asyncio.Task[Prompt]]) -> Phase:
        phase = Phase(name, self._rows, time.perf_counter())
        if name == "injected":
            for number, prompt in enumerate(self._prompts):
                self._tell(name, number / self._mix.n)
                _check(injected)
                injected.append(asyncio.create_task(self._inject(prompt)))
                await asyncio.sleep(1 / self._mix.qps)
            phase.prompts = list(await asyncio.gather(*injected))
        else:
            while (passed := time.perf_counter() - phase.began) < self._mix.seconds:
                self._tell(name, passed / self._mix.seconds)
                await asyncio.sleep(min(0.1, self._mix.seconds - passed))
        phase.ended = time.perf_counter()
        self._tell(name, 1.0)
        _check(self._decoders)
        phase.alive = sum(not decoder.done() for decoder in self._decoders)
        phase.rows = [list(row) for row in self._rows]
        return phase

    async def _inject(self, body: bytes) -> Prompt:
        events: Events = []
        sent = await self._stream(body, events)
        if not events:
            raise BenchError("an injected prompt got no token")
        return Prompt(sent, events[0][0])

    async def _stream(self, body: bytes, events: Events) -> float:
        """Stream one completion into `events`; returns when it was sent."""
        seen = 0

        def on_line(now: float, line: bytes) -> None:
            nonlocal seen
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                return
            event = _event(line[6:])
            if not event.choices:
                return
            tokens = seen + 1 if event.usage is None else event.usage.completion_tokens
            if tokens > seen:
                events.append((now, tokens - seen))
                seen = tokens

        return await self._target.fetch("POST", "/v1/completions", body, on_line)

    def _body(self, prompt: int, output: int) -> bytes:
        return msgspec.json.encode(
            {
                "model": self._mix.model,
                "prompt": [self._random.randrange(10, self._mix.vocabulary) for _ in range(prompt)],
                "max_tokens": output,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )


def _check(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Raise what one of them ended with."""
    for task in tasks:
        if task.done():
            task.result()


def _event(line: bytes) -> _Event:
    try:
        event = _decode(line)
    except msgspec.DecodeError as error:
        raise BenchError(f"the server sent an event that is no completion: {error}") from error
    if event.error is not None:
        raise BenchError(f"the server ended a stream: {event.error}")
    return event


# ------------------------------ figures


def gaps_ms(phase: Phase) -> Iterator[tuple[float, float]]:
    """(when it ended, ms) of every gap that lies within the phase."""
    for row in phase.rows:
        for (before, _), (after, _) in pairwise(row):
            if before >= phase.began and after <= phase.ended:
                yield after, (after - before) * 1e3


def figures(mix: Mix, phase: Phase, label: str = "") -> dict[str, Any]:
    """A phase as one flat row; times in ms unless the name says otherwise."""
    gaps = [gap for _, gap in gaps_ms(phase)]
    inside = [tokens for row in phase.rows for at, tokens in row if phase.began <= at <= phase.ended]
    ttft = [(prompt.first - prompt.sent) * 1e3 for prompt in phase.prompts]
    disturbed = phase.name == "injected"
    return {
        "label": label,
        "decoders": mix.decoders,
        "inject_len": mix.inject_len if disturbed else 0,
        "qps": mix.qps if disturbed else 0.0,
        "n": len(ttft),
        "itl_p50_ms": _percentile(gaps, 50),
        "itl_p90_ms": _percentile(gaps, 90),
        "itl_p99_ms": _percentile(gaps, 99),
        "itl_max_ms": _percentile(gaps, 100),
        "decode_tok_s": round(sum(inside) / (phase.ended - phase.began), 1),
        "tokens_per_event": round(sum(inside) / max(1, len(inside)), 3),
        "ttft_p50_ms": _percentile(ttft, 50),
        "ttft_p99_ms": _percentile(ttft, 99),
        "span_s": round(phase.ended - phase.began, 2),
        "decoders_alive": phase.alive,
    }


def _percentile(values: list[float], rank: float) -> float | None:
    return round(float(np.percentile(values, rank)), 2) if values else None
