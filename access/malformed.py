"""Bytes that are no message of the call's type: the client's fault, and told so.

Owns the calls that take one message. By itself gRPC ends such a call with UNKNOWN and a traceback in the log, as if the
server had failed. Streams read their messages themselves; methods that answer with one write it to their context.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

MALFORMED = object()
"""Stands for a message that can't be read."""

Handler = Any
"""grpc.RpcMethodHandler, whose stubs know no attributes."""


class MalformedInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses malformed messages with INVALID_ARGUMENT before the method is called."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}
        """By method: what was wrapped last, and in what."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or handler.request_streaming:
            return handler
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:  # an interceptor behind this one may make one for each call
            known = self._wrapped[method] = (handler, _refusing(handler, method))
        return known[1]


def _refusing(handler: Handler, method: str) -> Handler:
    """The handler of a call with one message, with the refusal in front."""
    message = f"the request is malformed: no message that {method} takes"
    coders = {
        "request_deserializer": functools.partial(_read, handler.request_deserializer),
        "response_serializer": handler.response_serializer,
    }
    if not handler.response_streaming:
        return grpc.unary_unary_rpc_method_handler(_checked(handler.unary_unary, message), **coders)
    return grpc.unary_stream_rpc_method_handler(_checked(handler.unary_stream, message), **coders)


def _read(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except DecodeError:
        return MALFORMED


def _checked(called: Callable[[Any, Any], Awaitable[Any]], message: str) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        if request is MALFORMED:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        return await called(request, context)

    return call
