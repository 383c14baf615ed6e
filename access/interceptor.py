"""The one door of a gRPC server: a call without a key goes nowhere, whatever its method.

Owns which methods are open to everybody: health alone, so that probes need no key. Reflection and methods that don't
exist need one like all others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from access.keys import NO_KEY, UNKNOWN_KEY, KeyFile
from access.malformed import MalformedInterceptor

OPEN_METHODS = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
METADATA = "the metadata `authorization: Bearer KEY`"


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Refuses calls with UNAUTHENTICATED before their first message is read."""

    def __init__(self, keys: KeyFile) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        authorization = _authorization(handler_call_details)
        if handler_call_details.method in OPEN_METHODS or self._keys.accepts(authorization):
            return await continuation(handler_call_details)
        self._keys.refused += 1
        # a stream handler runs without waiting for a message, and any kind of call can be refused by one
        refuse = partial(_refuse, NO_KEY if authorization is None else UNKNOWN_KEY)
        return grpc.stream_stream_rpc_method_handler(refuse)


def interceptors(keys: KeyFile | None) -> tuple[grpc.aio.ServerInterceptor, ...]:  # type: ignore[type-arg]
    """Of a server whose calls need one of the keys; None: they need none. Strangers aren't told what is malformed."""
    return (MalformedInterceptor(),) if keys is None else (TokenInterceptor(keys), MalformedInterceptor())


def _authorization(details: grpc.HandlerCallDetails) -> bytes | None:
    """The only such header; two of them are as good as none."""
    values = [value for name, value in details.invocation_metadata or () if name == "authorization"]
    if len(values) != 1:
        return None
    (value,) = values
    return value if isinstance(value, bytes) else str(value).encode()


async def _refuse(why: str, messages: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{why} {METADATA}")
