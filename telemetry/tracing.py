"""OpenTelemetry spans of one process, sent to a collector in the background (OTLP over gRPC).

Owns the exporter and the W3C trace context: what comes in with a call is a span's parent, what goes out with one is the
span itself. A caller's decision not to sample is kept. Needs the extra `otel`; imports it only when tracing is wanted.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

MAX_TRACEPARENT_CHARS = 64
HEADER = "traceparent"
CLOSE_S = 1.0
"""How long a collector that doesn't answer may hold up the end of a process, and with it the start of the next."""
_ENDPOINT = re.compile(r"(https?)://([^/\s]+:\d+)/?")
_STRAIGHT: Any = (("grpc.enable_http_proxy", 0),)


class TracingError(Exception):
    """Traces can't be sent as asked; the message says what would work."""


class Tracing:
    """Where this process's spans go."""

    def __init__(self, endpoint: str, service: str) -> None:
        """`endpoint` is http(s)://host:port of a collector. Raises TracingError."""
        match = _ENDPOINT.fullmatch(endpoint)
        if match is None:
            raise TracingError(
                f"--otlp-traces-endpoint is {endpoint!r}; it must be http://host:port or https://host:port"
            )
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise TracingError(
                "--otlp-traces-endpoint needs the packages of the extra otel: pip install 'greenlane[otel]'"
            ) from error
        exporter = OTLPSpanExporter(match[2], insecure=match[1] == "http", channel_options=_STRAIGHT)
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON), resource=Resource.create({"service.name": service}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("greenlane")
        self._context = TraceContextTextMapPropagator()
        self._trace = trace

    def begin(self, name: str, parent: str | None, attributes: Mapping[str, Any], began_ns: int | None = None) -> Any:
        """The span of a call that came in, below the W3C `traceparent` given, from now on or from a time since the
        epoch. End it yourself."""
        kind = self._trace.SpanKind.SERVER
        carrier = {HEADER: parent} if parent is not None and len(parent) <= MAX_TRACEPARENT_CHARS else {}
        return self._tracer.start_span(name, self._context.extract(carrier), kind, attributes, start_time=began_ns)

    def stage(self, span: Any, name: str, began_ns: int, ended_ns: int, attributes: Mapping[str, Any]) -> None:
        """A part of a span that is over, with its times since the epoch."""
        below = self._trace.set_span_in_context(span)
        part = self._tracer.start_span(name, below, attributes=attributes, start_time=began_ns)
        part.end(ended_ns)

    def traceparent(self, span: Any) -> str:
        """What a call made within the span carries."""
        carrier: dict[str, str] = {}
        self._context.inject(carrier, self._trace.set_span_in_context(span))
        return carrier[HEADER]

    def fail(self, span: Any, reason: str) -> None:
        """The span's work failed; the reason is a status or a type, never a message."""
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, reason))
        span.set_attribute("error.type", reason)

    def close(self) -> None:
        """Send what is left, within CLOSE_S."""
        last = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        last.start()
        last.join(CLOSE_S)
