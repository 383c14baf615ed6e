"""The details of a gRPC status as a client finds them: google.rpc messages in a trailer."""

from __future__ import annotations

from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

Detail = TypeVar("Detail", bound=Message)


def detail(error: grpc.aio.AioRpcError, kind: type[Detail]) -> Detail | None:
    """The status's detail of that kind, None if it has none."""
    trailers: Any = error.trailing_metadata()
    found = kind()
    for each in status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"]).details:
        if each.Unpack(found):
            return found
    return None


def named_field(error: grpc.aio.AioRpcError) -> str | None:
    """The field that the status's details blame."""
    request = detail(error, error_details_pb2.BadRequest)
    return None if request is None else str(request.field_violations[0].field)


def reason(error: grpc.aio.AioRpcError) -> str:
    """What happened, as programs read it."""
    info = detail(error, error_details_pb2.ErrorInfo)
    assert info is not None
    assert info.domain == "greenlane"
    return str(info.reason)


def retry_ms(error: grpc.aio.AioRpcError) -> int | None:
    """When to try again."""
    info = detail(error, error_details_pb2.RetryInfo)
    return None if info is None else int(info.retry_delay.ToMilliseconds())
