"""How a refused or failed request looks to its client: HTTP status and OpenAI-shaped body, or a gRPC status.

Owns the mapping from `ApiError` (and from errors that only HTTP knows) to both wires. Decides nothing about requests
and writes no log.
"""

from __future__ import annotations

import math
import traceback

import grpc
import msgspec
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from frontend.request import ApiError, Code

Headers = list[tuple[bytes, bytes]]

DEFAULT_RETRY_S = 1.0
STATUS_DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "greenlane"
"""Whose reasons an ErrorInfo holds."""

_HTTP_STATUS = {
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.INTERNAL: 500,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
}
_OPENAI_TYPE = {
    429: "rate_limit_error",
    499: "request_cancelled",
    500: "server_error",
    501: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_GRPC_STATUS = {code.value[0]: code for code in grpc.StatusCode}


class HttpError(Exception):
    """A refusal that only HTTP has (unknown path, wrong method, body too large); `status` is an HTTP status."""

    def __init__(self, status: int, message: str, headers: Headers | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = headers or []


def unexpected(error: Exception) -> ApiError:
    """What a client is told of an error that nobody foresaw: its type, never its text, which may hold anything."""
    return ApiError(Code.INTERNAL, f"the server failed on this request ({type(error).__name__}); its log says where")


def where(error: BaseException) -> str:
    """Type and places of an exception, for logs: its text and its values may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return " < ".join([type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames))])


def http_status(error: ApiError | HttpError) -> int:
    return error.status if isinstance(error, HttpError) else _HTTP_STATUS[error.code]


def http_headers(error: ApiError | HttpError) -> Headers:
    """Retry-After (whole seconds, at least 1) where waiting helps, Allow and the like where HTTP asks for them."""
    if isinstance(error, HttpError):
        return error.headers
    seconds = retry_after_s(error)
    return [] if seconds is None else [(b"retry-after", str(max(1, math.ceil(seconds))).encode())]


def retry_after_s(error: ApiError) -> float | None:
    """When to try again; None where waiting doesn't help."""
    if error.code not in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE):
        return None
    return DEFAULT_RETRY_S if error.retry_after_s is None else error.retry_after_s


def openai_body(error: ApiError | HttpError) -> bytes:
    """The JSON object that OpenAI clients expect of a failed call, in the answer or as an event of its stream."""
    status = http_status(error)
    parameter = None if isinstance(error, HttpError) else error.parameter
    code = "model_not_found" if status == 404 and parameter == "model" else None
    code = "invalid_api_key" if status == 401 else code
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": _OPENAI_TYPE.get(status, "invalid_request_error"),
                "param": parameter,
                "code": code,
            }
        }
    )


def grpc_status(error: ApiError) -> grpc.StatusCode:
    return _GRPC_STATUS[int(error.code)]


def grpc_details(error: ApiError) -> bytes:
    """A serialized google.rpc.Status for the trailer `grpc-status-details-bin`: always ErrorInfo, and where they apply
    BadRequest (the field to blame) and RetryInfo (when to try again)."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)]
    if error.parameter is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.parameter, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    seconds = retry_after_s(error)
    if seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=int(error.code), message=error.message, details=map(_packed, details))
    return bytes(status.SerializeToString())


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
