"""Traces from a client's own span through HTTP or gRPC and the session to the engine core's steps.

Real processes send to a collector of the test's, which takes OTLP over gRPC as any collector does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from scripts.serving import TINY
from tests.e2e.conftest import MakeServer
from tests.e2e.harness import long_request, text_stub, until

pytestmark = pytest.mark.e2e
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
CANARY = "the-canary-sang-at-dawn"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is exported to it."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: dict[bytes, str] = {}
        """Who sent a span, by its id."""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += scope.spans
                self.services.update((span.span_id, named["service.name"]) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace: str) -> list[Any]:
        return [span for span in self.spans if span.trace_id.hex() == trace]


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector and its URL."""
    server, service = grpc.server(futures.ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def child(spans: list[Any], parent: Any, name: str) -> Any:
    (found,) = [span for span in spans if span.parent_span_id == parent.span_id and span.name == name]
    return found


def test_a_trace_reaches_from_http_to_the_steps(
    make_server: MakeServer, collector: tuple[Collector, str], tmp_path: Path
) -> None:
    """Red if a client's trace context is lost on the way, a stage of its request is missing or has no step, stages
    don't follow one another within their request, an unsampled request is traced, or a span quotes a prompt."""
    received, url = collector
    steps = tmp_path / "steps"
    server = make_server(f"--otlp-traces-endpoint={url}", f"--step-log={steps}")
    with server.client() as client:
        body = {"model": "tiny", "prompt": CANARY, "max_tokens": 6, "temperature": 0}
        assert client.post("/v1/completions", json=body, headers={"traceparent": PARENT}).status_code == 200
        unsampled = PARENT.replace(TRACE, "1" * 32).removesuffix("01") + "00"
        assert client.post("/v1/completions", json=body, headers={"traceparent": unsampled}).status_code == 200
    until(lambda: len(received.of(TRACE)) >= 5, "the spans arrived")
    spans = received.of(TRACE)
    (root,) = [span for span in spans if span.parent_span_id.hex() == SPAN]
    assert (root.name, received.services[root.span_id]) == ("POST /v1/completions", "greenlane-frontend")
    assert attributes(root)["gen_ai.usage.output_tokens"] == 6
    engine = child(spans, root, "engine request")
    assert received.services[engine.span_id] == "greenlane-engine"
    parts = [child(spans, engine, name) for name in ("queue", "prefill", "decode")]
    times = [engine.start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
    assert times == sorted(times)
    assert [part.start_time_unix_nano for part in parts] == times[:-1]
    assert times[-1] == engine.end_time_unix_nano <= root.end_time_unix_nano
    first, last = attributes(parts[2])["greenlane.first_step"], attributes(parts[2])["greenlane.last_step"]
    assert 0 < last - first <= 5, "six tokens, the first with the prefill; steps that come back together count as one"
    logged = {int(number) for number in re.findall(r'"step":(\d+)', steps.read_text())}
    assert {first, last} <= logged
    assert received.of("1" * 32) == []
    assert all(CANARY not in str(span) for span in received.spans)


def test_a_call_of_grpc_and_its_abort(make_server: MakeServer, collector: tuple[Collector, str]) -> None:
    """Red if a gRPC call isn't traced, starts no trace of its own where it brings no context, or stays open for ever
    when its client leaves."""
    received, url = collector
    server = make_server(f"--otlp-traces-endpoint={url}")
    with text_stub(server.grpc) as stub:
        call = stub.Generate(long_request(), metadata=(("traceparent", PARENT),))
        next(iter(call))
        call.cancel()
        assert list(stub.Generate(long_request(max_tokens=2)))
    until(lambda: len(received.spans) >= 10, "both calls' spans arrived")
    (root,) = [span for span in received.of(TRACE) if span.parent_span_id.hex() == SPAN]
    assert root.name == "greenlane.text.v1.Text/Generate"
    assert attributes(root)["greenlane.outcome"] == "cancelled"
    assert attributes(child(received.of(TRACE), root, "engine request"))["gen_ai.usage.input_tokens"] > 0
    (own,) = [span for span in received.spans if not span.parent_span_id]
    assert child(received.spans, own, "engine request").trace_id == own.trace_id


def test_a_refused_request(make_server: MakeServer, collector: tuple[Collector, str]) -> None:
    """Red if a request that the session refuses, before the engine sees it, has its span open until the session ends:
    every step looks through those that are open."""
    received, url = collector
    server = make_server(f"--otlp-traces-endpoint={url}")
    with server.client() as client:
        body = {"model": "tiny", "prompt": CANARY, "max_tokens": 10**6}
        assert client.post("/v1/completions", json=body, headers={"traceparent": PARENT}).status_code == 400
    until(lambda: len(received.of(TRACE)) == 3, "call, request and its time in the queue arrived")
    (root,) = [span for span in received.of(TRACE) if span.parent_span_id.hex() == SPAN]
    assert attributes(root)["greenlane.outcome"] == "rejected"
    assert attributes(child(received.of(TRACE), root, "engine request"))["error.type"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("url", ["127.0.0.1:4317", "http://127.0.0.1", "ftp://127.0.0.1:4317"])
def test_endpoints_that_are_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if traces are silently sent nowhere."""
    from engine_core.cli import main as engine
    from frontend.__main__ import main as frontend

    assert engine(["engine", "--check-flags", f"--model={TINY}", f"--otlp-traces-endpoint={url}"]) == 2
    assert "--otlp-traces-endpoint is" in capsys.readouterr().err
    flags = ["--engine-address=unix:/nowhere", "--check-flags", f"--otlp-traces-endpoint={url}"]
    assert frontend([f"--model={TINY}", *flags]) == 2
    assert "--otlp-traces-endpoint is" in capsys.readouterr().err
