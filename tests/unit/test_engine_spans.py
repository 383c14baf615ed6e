"""Spans of the engine core over a tracer that writes down what it is told: ends, refusals, losses, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from greenlane.engine.v1 import engine_pb2 as pb

from engine_core.errors import StatusCode
from engine_core.request import FINISH_LENGTH, FINISH_REJECTED, Finish, FinishError, Output
from engine_core.spans import EngineSpans

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Span:
    parent: str | None
    attributes: dict[str, Any]
    stages: list[tuple[str, int, int, dict[str, Any]]] = field(default_factory=list)
    failed: str | None = None
    ends: int = 0

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def end(self, _: int | None = None) -> None:
        self.ends += 1


class Recorder:
    """In place of `telemetry.tracing.Tracing`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.now = 0
        self.tracer = EngineSpans(self, lambda: self.now)  # type: ignore[arg-type]

    def begin(self, name: str, parent: str | None, attributes: Mapping[str, Any], began_ns: int) -> Span:
        self.spans.append(Span(parent, dict(attributes)))
        return self.spans[-1]

    def stage(self, span: Span, name: str, began_ns: int, ended_ns: int, attributes: Mapping[str, Any]) -> None:
        span.stages.append((name, began_ns, ended_ns, dict(attributes)))

    def fail(self, span: Span, reason: str) -> None:
        span.failed = reason


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def add(number: int, **sampling: Any) -> pb.AddRequest:
    return pb.AddRequest(number=number, trace_parent=PARENT, sampling=pb.SamplingParams(**sampling))


def output(step: int, *numbers: int, started: tuple[int, ...] = (), finishes: tuple[Finish, ...] = ()) -> Output:
    ids = np.array(numbers, np.uint64)
    return Output(7, step, started=[(each, 0) for each in started], numbers=ids, finishes=list(finishes))


def steps(first: int, last: int) -> dict[str, int]:
    return {"greenlane.first_step": first, "greenlane.last_step": last}


def test_stages_follow_one_another(recorder: Recorder) -> None:
    """Red if a stage begins elsewhere than the one before ended, or names another step."""
    recorder.tracer.asked(7, [add(1)])
    for now, out in (
        (10, output(3, started=(1,))),
        (20, output(4)),
        (30, output(5, 1)),
        (40, output(6, 1, finishes=(Finish(1, FINISH_LENGTH, 4, 2, 0),))),
    ):
        recorder.now = now
        recorder.tracer.published(out)
    (span,) = recorder.spans
    assert span.stages == [("queue", 0, 10, {}), ("prefill", 10, 30, steps(3, 5)), ("decode", 30, 40, steps(5, 6))]
    assert (span.parent, span.ends, span.failed, recorder.tracer._sessions) == (PARENT, 1, None, {7: {}})


def test_a_request_ends_with_its_last_sequence(recorder: Recorder) -> None:
    """Red if a span ends with the first of several sequences, or sequences of others count."""
    recorder.tracer.asked(7, [add(1, n=3), add(4)])
    for number in (3, 1):
        recorder.tracer.published(output(2, finishes=(Finish(number, FINISH_LENGTH, 1, 1, 0),)))
    assert [span.ends for span in recorder.spans] == [0, 0]
    recorder.tracer.published(output(3, finishes=(Finish(2, FINISH_LENGTH, 1, 1, 0),)))
    assert [span.ends for span in recorder.spans] == [1, 0]


@pytest.mark.parametrize("n", [0, 1, 129, 4_000_000_000])
def test_a_refused_request_leaves_nothing(recorder: Recorder, n: int) -> None:
    """Red if a request that is refused, whatever it asked for, stays open here, or its span looks well."""
    recorder.tracer.asked(7, [add(1, n=n)])
    error = FinishError(StatusCode.INVALID_ARGUMENT, "no")
    recorder.tracer.published(output(0, finishes=(Finish(1, FINISH_REJECTED, 1, 0, 0, error=error),)))
    (span,) = recorder.spans
    assert (span.failed, span.ends, recorder.tracer._sessions) == ("INVALID_ARGUMENT", 1, {7: {}})
    assert [stage[0] for stage in span.stages] == ["queue"]


def test_a_closed_session_ends_its_spans(recorder: Recorder) -> None:
    """Red if spans of a session that is gone stay open or are kept, or those of others end."""
    recorder.tracer.asked(7, [add(1), add(2)])
    recorder.tracer.asked(8, [add(1)])
    recorder.tracer.published(output(3, started=(1,)))
    recorder.tracer.closed(7)
    recorder.tracer.closed(7)
    assert [(span.failed, span.ends) for span in recorder.spans] == [("CANCELLED", 1), ("CANCELLED", 1), (None, 0)]
    recorder.tracer.published(output(4, 1, finishes=(Finish(1, FINISH_LENGTH, 1, 1, 0),)))
    assert list(recorder.tracer._sessions) == [8]


def test_only_requests_with_a_context_are_traced(recorder: Recorder) -> None:
    """Red if a request without a trace context costs a span."""
    recorder.tracer.asked(7, [pb.AddRequest(number=1)])
    recorder.tracer.published(output(1, 1, started=(1,)))
    assert recorder.spans == []
