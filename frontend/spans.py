"""Traces of a frontend: one span for each request that a client makes, handed on to the engine core.

Owns the span of the call being served, which follows its tasks, and what is told of a request on it. Without tracing
everything here costs a look at a variable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from telemetry.tracing import HEADER, Tracing

TRACED_METHODS = ("/greenlane.text.v1.Text/Generate", "/vllm.grpc.engine.VllmEngine/Generate")


class CallSpan:
    """The span of the call that is being served."""

    def __init__(self, tracing: Tracing, span: Any) -> None:
        self._tracing = tracing
        self._span = span

    def traceparent(self) -> str:
        return self._tracing.traceparent(self._span)

    def first_token(self) -> None:
        self._span.add_event("first token")

    def usage(self, prompt_tokens: int, output_tokens: int, outcome: str) -> None:
        """A request of the call ended."""
        self._span.set_attribute("gen_ai.usage.input_tokens", prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", output_tokens)
        self._span.set_attribute("greenlane.outcome", outcome)


_serving: ContextVar[CallSpan | None] = ContextVar("serving", default=None)


def serving() -> CallSpan | None:
    """Of the call within which this runs; None: it isn't traced."""
    return _serving.get()


class Spans:
    """Makes them, if there is somewhere to send them to."""

    def __init__(self, tracing: Tracing | None) -> None:
        self._tracing = tracing

    @property
    def wanted(self) -> bool:
        return self._tracing is not None

    @contextlib.contextmanager
    def call(self, name: str, parent: str | None, attributes: dict[str, Any]) -> Iterator[None]:
        """A span around a call; an exception out of it is its error."""
        if self._tracing is None:
            yield
            return
        span = self._tracing.begin(name, parent, attributes)
        _serving.set(CallSpan(self._tracing, span))  # in the call's own task, so nothing need be restored
        try:
            yield
        except BaseException as error:
            self._tracing.fail(span, type(error).__name__)
            raise
        finally:
            span.end()

    def close(self) -> None:
        if self._tracing is not None:
            self._tracing.close()


class SpanInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """A span around every Generate call of gRPC."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if method not in TRACED_METHODS or handler is None or handler.unary_stream is None:
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        parent = metadata.get(HEADER)
        attributes = {"rpc.system": "grpc", "rpc.method": method.removeprefix("/")}
        serve = handler.unary_stream

        async def traced(request: Any, context: Any) -> Any:
            with self._spans.call(method.removeprefix("/"), None if parent is None else str(parent), attributes):
                return await serve(request, context)

        return grpc.unary_stream_rpc_method_handler(traced, handler.request_deserializer, handler.response_serializer)
