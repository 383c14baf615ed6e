"""What a session writes, when, and how much of it may be unacknowledged."""

from __future__ import annotations

import numpy as np
import pytest
from greenlane.engine.v1 import engine_pb2 as pb

from engine_core.errors import StatusCode
from engine_core.request import (
    FINISH_STOP,
    Finish,
    Output,
)
from engine_core.session import HEARTBEAT_S, MAX_ADDS, Session, SessionBroken
from tests.unit.session_rig import break_with, opened


def test_one_write_is_outstanding_and_later_steps_merge() -> None:
    """Red when a message is handed out before the previous one was taken, or merged steps lose order."""
    session = opened()
    first = None
    for step in (1, 2, 3):
        session.publish(Output(7, step, accepted=[step]))
        first = session.take(0.0) if step == 1 else first
        assert session.take(0.0) is None
    session.written(0.0)
    second = session.take(0.0)
    assert first is not None
    assert second is not None
    assert (first.output.sequence, first.output.step) == (1, 1)
    assert (second.output.sequence, second.output.step) == (2, 3)
    assert np.frombuffer(second.output.accepted, "<u8").tolist() == [2, 3]


def test_a_heartbeat_follows_a_second_of_silence_only() -> None:
    """Red when an idle session is silent (a frozen core goes unnoticed) or heartbeats are sent beside outputs."""
    session = opened()
    assert session.take(HEARTBEAT_S - 0.01) is None
    assert session.due(HEARTBEAT_S - 0.01) == HEARTBEAT_S
    assert session.take(HEARTBEAT_S) == pb.SessionResponse()
    assert session.take(100.0) is None, "a write is outstanding: nobody knows that the client hears nothing"
    session.written(1.5)
    assert session.due(1.5) == 1.5 + HEARTBEAT_S
    assert session.take(1.5 + HEARTBEAT_S) == pb.SessionResponse()


@pytest.mark.parametrize("wanted", [0.1, 2.0, 60.0])
def test_heartbeats_come_as_the_client_wants_them(wanted: float) -> None:
    """Red when a client that waits less than a few seconds takes an idle core for frozen, or one that waits longer
    costs the core a message a second."""
    session = opened(greeted=False)
    session.receive(pb.SessionRequest(hello=pb.Hello(protocol_version=1, heartbeat_s=wanted)), 0.0)
    assert session.take(0.0) is not None
    session.written(0.0)
    assert session.take(wanted - 0.01) is None
    assert session.due(wanted - 0.01) == wanted
    assert session.take(wanted) == pb.SessionResponse()


def test_a_change_of_state_is_told_at_once_and_once() -> None:
    """Red when a client hears of the core's state only with a heartbeat, after the ends it explains, or twice."""
    session = opened()
    assert session.take(0.1) is None
    session.tell_state(pb.ENGINE_STATE_DRAINING)
    unsettled = not session.settled
    told = session.take(0.1)
    assert told is not None
    assert (told.state, told.HasField("output")) == (pb.ENGINE_STATE_DRAINING, False)
    session.written(0.1)
    assert (unsettled, session.settled) == (True, True)
    assert session.take(0.1) is None
    session.tell_state(pb.ENGINE_STATE_DEAD)
    session.publish(Output(session.number, 1, finishes=[Finish(0, FINISH_STOP, 1, 1, 0)]))
    told = session.take(0.2)
    assert told is not None
    assert (told.state, len(told.output.finishes)) == (pb.ENGINE_STATE_DEAD, 1)


def test_a_client_that_acknowledges_nothing_is_cut_off() -> None:
    """Red when unacknowledged bytes, written or not, aren't bounded."""
    session = opened(max_unacked_bytes=16 << 10)

    def flood() -> None:
        for step in range(1000):
            session.publish(tokens(step))
            session.take(0.0)

    with pytest.raises(SessionBroken, match="unacknowledged") as caught:
        flood()
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED


def test_acks_make_room() -> None:
    """Red when acknowledged bytes keep counting: every long-lived session would be cut off."""
    session = opened(max_unacked_bytes=16 << 10)
    for step in range(1, 200):
        session.publish(tokens(step))
        message = session.take(0.0)
        assert message is not None
        session.written(0.0)
        assert not session.settled
        session.receive(pb.SessionRequest(ack=message.output.sequence), 0.0)
        assert session.settled


def written_step(session: Session, now: float = 0.0) -> pb.StepOutput | None:
    """What a transport with room writes at once."""
    message = session.take(now)
    if message is None:
        return None
    session.written(now)
    return message.output if message.HasField("output") else None


def test_nothing_follows_merged_steps_before_their_ack() -> None:
    """Red when messages pile up, growing old, in front of a client that can't keep up; or when one that can is made to
    acknowledge every step."""
    session = opened()
    for step in (1, 2):  # one by one: no ack is asked for, and none is waited for
        session.publish(tokens(step))
        output = written_step(session)
        assert output is not None
        assert (output.step, output.HasField("ack_now")) == (step, False)
    for step in (3, 4):
        session.publish(tokens(step))
    merged = written_step(session)
    assert merged is not None
    assert (merged.sequence, merged.step, merged.ack_now) == (3, 4, True)
    session.publish(tokens(5))
    session.receive(pb.SessionRequest(ack=2), 0.0)
    assert written_step(session) is None
    assert session.take(HEARTBEAT_S) == pb.SessionResponse(), "a heartbeat waits for no ack"
    session.written(HEARTBEAT_S)
    session.receive(pb.SessionRequest(ack=3), HEARTBEAT_S)
    output = written_step(session, HEARTBEAT_S)
    assert output is not None
    assert (output.sequence, output.step, output.HasField("ack_now")) == (4, 5, False)


def test_a_client_that_never_acknowledges_merged_steps_is_cut_off() -> None:
    """Red when what waits behind merged steps isn't counted: a frozen frontend would fill the engine core's memory."""
    session = opened(max_unacked_bytes=16 << 10)
    session.publish(tokens(1))
    session.publish(tokens(2))
    assert written_step(session) is not None

    def flood() -> None:
        for step in range(3, 1000):
            session.publish(tokens(step))
            assert written_step(session) is None

    with pytest.raises(SessionBroken, match="unacknowledged"):
        flood()


def test_acks_may_not_go_back() -> None:
    """Red when an ack below an earlier one passes."""
    session = opened()
    for step in (1, 2):
        session.publish(tokens(step))
        assert session.take(0.0) is not None
        session.written(0.0)
    session.receive(pb.SessionRequest(ack=2), 0.0)
    session.receive(pb.SessionRequest(ack=2), 0.0)
    break_with(session, pb.SessionRequest(ack=1), StatusCode.INVALID_ARGUMENT, "ack 1")


def test_refusals_count_against_the_bound_too() -> None:
    """Red when a client that only sends bad requests can make the core queue answers without end."""
    session = opened(max_unacked_bytes=8 << 10)
    flood = pb.SessionRequest(adds=[pb.AddRequest(number=number) for number in range(MAX_ADDS)])
    with pytest.raises(SessionBroken, match="unacknowledged"):
        session.receive(flood, 0.0)


def tokens(step: int, rows: int = 64) -> Output:
    numbers = np.arange(rows, dtype=np.uint64)
    return Output(7, step, numbers=numbers, tokens=np.full(rows, step, np.int32), finishes=[Finish(1, 1, 1, 1, 0)])
