"""Traces of the engine core: a span for each request that came with a trace context, and its stages as parts of it.

Owns what is known of traced requests between their admission and their end, from the outside: it sees messages come in
and outputs go out, and touches neither the scheduler nor the engine thread. Steps are named by their numbers, as in the
step log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from greenlane.engine.v1 import engine_pb2 as pb

from engine_core.request import FINISH_ERROR, FINISH_REJECTED, MAX_N, Finish, Output
from telemetry.tracing import Tracing


@dataclass(slots=True)
class _Traced:
    span: Any
    last_number: int
    """Its sequences are those from the request's number to this one."""
    began: int
    """ns since the epoch, as the others."""
    open: int
    started: tuple[int, int] | None = None
    """Time and step of the first prefill …"""
    first_token: tuple[int, int] | None = None
    """… and of the first token."""


class EngineSpans:
    """Of all sessions. Every call comes from the gRPC thread."""

    def __init__(self, tracing: Tracing, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracing = tracing
        self._clock_ns = clock_ns
        self._sessions: dict[int, dict[int, _Traced]] = {}

    def asked(self, session: int, adds: Iterable[pb.AddRequest]) -> None:
        """Requests came in; those without a trace context aren't traced."""
        for add in adds:
            if add.HasField("trace_parent"):
                given = add.sampling.n if add.sampling.HasField("n") else 1
                count = given if 1 <= given <= MAX_N else 1  # as the session claims numbers for it
                attributes = {"greenlane.request": add.number, "greenlane.sequences": count}
                now = self._clock_ns()
                span = self._tracing.begin("engine request", add.trace_parent, attributes, now)
                traced = _Traced(span, add.number + count - 1, now, count)
                self._sessions.setdefault(session, {})[add.number] = traced

    def published(self, output: Output) -> None:
        """A step's outputs are on their way to their session."""
        requests = self._sessions.get(output.session)
        if not requests:
            return
        now = self._clock_ns()
        for number, _ in output.started:
            traced = _owner(requests, number)
            if traced is not None and traced.started is None:
                traced.started = now, output.step
        if any(traced.first_token is None for traced in requests.values()):
            for number in set(output.numbers.tolist()):
                traced = _owner(requests, number)
                if traced is not None and traced.first_token is None:
                    traced.first_token = now, output.step
        for finish in output.finishes:
            self._finished(output, finish, now)

    def _finished(self, output: Output, finish: Finish, now: int) -> None:
        requests = self._sessions[output.session]
        traced = _owner(requests, finish.number)
        if traced is None:
            return
        traced.open -= 1
        if finish.reason in (FINISH_ERROR, FINISH_REJECTED):
            self._tracing.fail(traced.span, "UNKNOWN" if finish.error is None else finish.error.code.name)
        if traced.open == 0:
            traced.span.set_attribute("gen_ai.usage.input_tokens", finish.prompt_tokens)
            traced.span.set_attribute("greenlane.cached_tokens", finish.cached_tokens)
            self._stages(traced, now, output.step)
            traced.span.end(now)
            del requests[next(number for number, each in requests.items() if each is traced)]

    def _stages(self, traced: _Traced, now: int, step: int | None) -> None:
        """The request's time as parts: in the queue, its prompt, its tokens; as far as it got."""
        began = traced.began
        for name, turn, first in (
            ("queue", traced.started, None),
            ("prefill", traced.first_token, traced.started),
            ("decode", (now, step), traced.first_token),
        ):
            if name != "queue" and first is None:
                continue
            ended, last = turn or (now, step)
            steps = {} if first is None else {"greenlane.first_step": first[1]}
            if first is not None and last is not None:
                steps["greenlane.last_step"] = last
            self._tracing.stage(traced.span, name, began, ended, steps)
            began = ended

    def closed(self, session: int) -> None:
        """The session is over, and with it what it had open."""
        for traced in self._sessions.pop(session, {}).values():
            self._tracing.fail(traced.span, "CANCELLED")
            self._stages(traced, self._clock_ns(), None)
            traced.span.end()


def _owner(requests: dict[int, _Traced], number: int) -> _Traced | None:
    """The traced request that a sequence belongs to: nearly always the one of its own number."""
    traced = requests.get(number)
    if traced is not None:
        return traced
    return next((each for first, each in requests.items() if first < number <= each.last_number), None)
