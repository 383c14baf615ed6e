"""Garbage collection stays away from streams: requests leave nothing for it, and a burst of them doesn't call it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from greenlane.engine.v1 import engine_pb2 as pb

import frontend.process
from frontend.request import Sampling, TextRequest
from frontend.session import Session
from frontend.streams import RequestStream, Sequence
from frontend.wire import build_add
from tests.unit.scripted_engine import finish, info, step_output

BURST = 256
HELD_BY_A_CALL = 140
"""Objects that the collector knows, in the frontend."""


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def known() -> int:
    """Streams and sequences that exist, by exact types: some modules' objects warn when asked for their class."""
    return sum(type(one) in (RequestStream, Sequence) for one in gc.get_objects())


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


@pytest.mark.usefixtures("collector")
def test_a_burst_of_calls_is_not_looked_through() -> None:
    """Red if the frontend keeps Python's own thresholds: each collection holds up every stream, by ms."""
    frontend.process.keep_out_of_collections()
    before = collections()
    held: list[list[int]] = [[] for _ in range(BURST * HELD_BY_A_CALL)]
    assert collections() == before
    assert len(held) == BURST * HELD_BY_A_CALL


@pytest.mark.parametrize("ends", ["finished", "aborted"])
def test_a_request_that_is_over_frees_itself(ends: str) -> None:
    """Red if a request's stream and its sequences hold each other: only a collection frees them then."""
    front = Session(pb.Welcome(protocol_version=1, info=info()), lambda: None)
    gc.collect()
    gc.disable()
    before = known()
    try:
        stream = front.add(build_add(TextRequest([1], Sampling(n=2)), 16, 1 << 20))
        assert front.take() is not None
        finishes = [finish(1), finish(2)] if ends == "finished" else []
        front.receive(pb.SessionResponse(output=step_output(1, tokens=[(1, 5), (2, 6)], finishes=finishes)))
        while front.hand_on():
            pass
        for sequence in stream.ready:
            sequence.take()
        stream.ready.clear()
        front.abort(stream)
        del stream, sequence
        assert known() == before
    finally:
        gc.enable()
