"""What every gRPC method of a frontend shares: whatever it raises becomes the call's status, and how long it may take.

Owns the one place where errors turn into statuses; `api_errors.py` says what stands in them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from frontend.api_errors import STATUS_DETAILS_KEY, grpc_details, grpc_status, unexpected, where
from frontend.request import ApiError, Code

logger = logging.getLogger(__name__)

MAX_LABEL_CHARS = 64
"""Of a client's own request id, which only labels logs."""
MIN_DEADLINE_S = 0.001
FAR_S = 1e8
"""Deadlines this many seconds away are none."""

Method = Callable[[Any, Any, Any], Awaitable[Any]]
"""A servicer's method: itself, the request, the call's context."""


def with_status(method: Method) -> Method:
    """The method with whatever it raises turned into the call's status."""

    @functools.wraps(method)
    async def call(service: Any, request: Any, context: Any) -> Any:
        try:
            return await method(service, request, context)
        except grpc.aio.InternalError as error:  # a write was under way when the client left, or it left before it
            logger.debug("%s: the client has gone (%s)", method.__qualname__, where(error))
            failed = ApiError(Code.CANCELLED, "the client has gone")
        except ApiError as error:
            failed = error
        except Exception as error:  # whatever it is, the client gets a status and the server lives
            logger.error("%s failed: %s", method.__qualname__, where(error))
            failed = unexpected(error)
        details = ((STATUS_DETAILS_KEY, grpc_details(failed)),)
        try:
            return await context.abort(grpc_status(failed), failed.message, trailing_metadata=details)
        except grpc.aio.InternalError:  # the client left in the meantime: nobody is there to be told
            raise asyncio.CancelledError from None

    return call


def deadline_s(context: Any) -> float | None:
    """Seconds that the call may still take; None without a deadline."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None or remaining > FAR_S else max(MIN_DEADLINE_S, remaining)
