"""Errors of the engine core as plain data: why a request was refused, why it failed, why the engine stopped.

Owns the enums that travel on the wire and their gRPC codes. Renders no text for people beyond the message that the
raiser wrote: that is the edge's job (`service.py`, the frontend).
"""

from __future__ import annotations

import enum


class StatusCode(enum.IntEnum):
    """The google.rpc.Code values that the engine core uses."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15


class RejectReason(enum.IntEnum):
    """Why a request was never accepted. Values are those of greenlane.engine.v1.RejectReason."""

    EMPTY_PROMPT = 1
    TOKEN_OUT_OF_VOCABULARY = 2
    CONTEXT_EXCEEDED = 3
    PARAMETER_OUT_OF_RANGE = 4
    UNSUPPORTED = 5
    NEVER_FITS = 6
    QUEUE_FULL = 7
    DRAINING = 8
    MALFORMED = 9
    GRAMMAR = 10

    @property
    def code(self) -> StatusCode:
        """The gRPC status of a refusal for this reason."""
        if self is RejectReason.QUEUE_FULL:
            return StatusCode.RESOURCE_EXHAUSTED
        if self is RejectReason.DRAINING:
            return StatusCode.UNAVAILABLE
        return StatusCode.INVALID_ARGUMENT


class Rejected(Exception):
    """A request that can't be accepted; nothing was allocated for it.

    `parameter` names the offending field, where one is to blame; `retry_after_s` is set where waiting helps.
    """

    def __init__(
        self, reason: RejectReason, message: str, parameter: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.parameter = parameter
        self.retry_after_s = retry_after_s


class ConfigError(Exception):
    """A flag, file or model folder that can't be served; the message names the flag and what would work."""


class ProtocolViolation(Exception):
    """A peer broke the wire contract (gap, duplicate, unknown version, malformed frame): fail-stop."""


class EngineDead(Exception):
    """The engine can't go on; the message holds the whole cause chain. Raised once, ends the engine loop."""


def describe_chain(error: BaseException) -> str:
    """The error and all its causes, outermost first, joined by `: `, with their types where the message needs one."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        text = str(current)
        parts.append(
            text
            if isinstance(current, (EngineDead, ConfigError, ProtocolViolation)) and text
            else f"{type(current).__name__}: {text}"
        )
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return ": ".join(parts)
