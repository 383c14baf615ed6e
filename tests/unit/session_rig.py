"""A session that a test feeds by hand, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from greenlane.engine.v1 import engine_pb2 as pb

from engine_core.errors import StatusCode
from engine_core.request import (
    ModelLimits,
    Request,
)
from engine_core.session import Session, SessionBroken

LIMITS = ModelLimits(vocab_size=1000, max_model_len=128, page_size=4, total_pages=64)
HELLO = pb.SessionRequest(hello=pb.Hello(protocol_version=1, client_name="test"))


def opened(*, greeted: bool = True, max_unacked_bytes: int = 1 << 20) -> Session:
    session = Session(
        7, LIMITS, pb.GetInfoResponse(model="m"), now=0.0, draw_seed=lambda: 42, max_unacked_bytes=max_unacked_bytes
    )
    if greeted:
        assert session.receive(HELLO, 0.0) == []
        welcome = session.take(0.0)
        assert welcome is not None
        assert welcome.welcome.protocol_version == 1
        assert welcome.welcome.info.model == "m"
        session.written(0.0)
    return session


def packed(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


def add(number: int = 1, ids: bytes = packed(1, 2, 3), **fields: Any) -> pb.SessionRequest:
    return pb.SessionRequest(adds=[pb.AddRequest(number=number, prompt_ids=ids, **fields)])


def sampling(**fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**fields)


def request_of(session: Session, message: pb.SessionRequest, now: float = 0.0) -> Request:
    (command,) = session.receive(message, now)
    assert isinstance(command, Request)
    return command


def refusals(session: Session, message: pb.SessionRequest) -> list[pb.Finish]:
    """The last words that answer a message which holds no acceptable request."""
    assert session.receive(message, 0.0) == []
    answer = session.take(0.0)
    assert answer is not None
    session.written(0.0)
    return list(answer.output.finishes)


def break_with(session: Session, message: pb.SessionRequest, code: StatusCode, text: str) -> None:
    with pytest.raises(SessionBroken, match=text) as caught:
        session.receive(message, 0.0)
    assert caught.value.code is code
