"""The frontend's session protocol by values, without I/O, and the messages it builds."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np
import pytest
from greenlane.engine.v1 import engine_pb2 as pb

from frontend.request import ApiError, Code, Sampling, TextRequest
from frontend.session import MAX_ADDS, MAX_UNSENT_BYTES, Session
from frontend.wire import ProtocolViolation, build_add, prefix_chain
from tests.unit.scripted_engine import finish, info, step_output

MIB = 1 << 20
HANG_GUARD_S = 20.0


def session(**changes: Any) -> Session:
    return Session(pb.Welcome(protocol_version=1, info=info(**changes)), lambda: None)


def add(ids: list[int] | None = None, **fields: Any) -> pb.AddRequest:
    return build_add(TextRequest(ids or [1, 2, 3], **fields), 16, MIB - 32)


def everything(of: Session) -> list[pb.SessionRequest]:
    """All messages that are due."""
    messages = []
    while (message := of.take()) is not None:
        messages.append(message)
    return messages


def respond(to: Session, output: pb.StepOutput) -> None:
    to.receive(pb.SessionResponse(output=output))
    while to.hand_on():
        pass
    to.acknowledge()


def test_messages_stay_within_their_limit() -> None:
    """Red if adds or aborts are packed beyond 1 MiB, lost, or sent out of order."""
    front = session()
    streams = [front.add(add(list(range(4000)), label="x" * 200)) for _ in range(200)]
    messages = everything(front)
    assert len(messages) > 3
    assert all(message.ByteSize() <= MIB for message in messages)
    assert [one.number for message in messages for one in message.adds] == list(range(1, 201))
    wide = [front.add(add(sampling=Sampling(n=128))) for _ in range(1200)]
    everything(front)
    for stream in (*streams, *wide):
        front.abort(stream)
    messages = everything(front)
    aborted = [number for message in messages for number in np.frombuffer(message.aborts, "<u8").tolist()]
    assert all(message.ByteSize() <= MIB for message in messages)
    assert len(messages) > 1
    assert sorted(aborted) == list(range(1, 201 + 1200 * 128))


def test_more_than_the_server_can_hold_is_refused_here() -> None:
    """Red if a burst of prompts is sent on, to come back as tens of thousands of refusals that drown the session."""
    front = session()
    front.info.limits.max_queue, front.info.limits.max_num_seqs = 8, 4
    first = front.add(add(sampling=Sampling(n=10)))
    with pytest.raises(ApiError, match="10 sequences are open and 3 more exceed the 12") as refused:
        front.add(add(sampling=Sampling(n=3)))
    assert refused.value.code is Code.RESOURCE_EXHAUSTED
    front.abort(first)
    front.add(add(sampling=Sampling(n=12)))


def test_a_message_holds_no_more_adds_than_the_engine_core_takes() -> None:
    """Red if many small requests are packed into one message, which the engine core refuses."""
    front = session()
    for _ in range(MAX_ADDS + 1):
        front.add(add([1]))
    assert [len(message.adds) for message in everything(front)] == [MAX_ADDS, 1]


def test_the_largest_prompt_fits_and_drops_its_hashes_first() -> None:
    """Red if a prompt at the limit makes a message beyond it, or a prompt that fits without hashes is refused."""
    front = session()
    fitting = add([1] * 150_000)
    bare = add([1] * 250_000)
    largest = add([1] * ((MIB - 64) // 4))
    assert fitting.HasField("prefix_hashes")
    assert not bare.HasField("prefix_hashes")
    for one in (fitting, bare, largest):
        front.add(one)
    messages = everything(front)
    assert [len(message.adds) for message in messages] == [1, 1, 1]
    assert all(message.ByteSize() <= MIB for message in messages)
    with pytest.raises(ApiError, match="beyond what one request can carry"):
        add([1] * (MIB // 4))


def test_requests_waiting_for_a_stuck_transport_are_bounded() -> None:
    """Red if a core that doesn't read lets the frontend queue without end, or if sent bytes stay counted."""
    front = session()
    big = add([1] * 100_000)
    for _ in range(MAX_UNSENT_BYTES // (big.ByteSize() + 16)):
        front.add(build_copy(big))
    with pytest.raises(ApiError) as refused:
        front.add(build_copy(big))
    assert refused.value.code is Code.RESOURCE_EXHAUSTED
    everything(front)
    front.add(build_copy(big))


def build_copy(of: pb.AddRequest) -> pb.AddRequest:
    copy = pb.AddRequest()
    copy.CopyFrom(of)
    copy.ClearField("number")
    return copy


def test_every_message_acknowledges_what_was_received() -> None:
    """Red if an add goes out without the ack that is due anyway."""
    front = session()
    front.add(add())
    everything(front)
    respond(front, step_output(1, tokens=[(1, 5)]))
    assert everything(front) == []
    front.add(add())
    (message,) = everything(front)
    assert message.ack == 1
    assert everything(front) == []


@pytest.mark.parametrize("end", ["LENGTH", "ERROR"])
def test_the_last_word_is_acknowledged_at_once(end: str) -> None:
    """Red if a core that stops waits in vain for the ack of a failure, or of the last open request's end."""
    front = session()
    front.add(add())
    if end == "ERROR":
        front.add(add())
    everything(front)
    respond(front, step_output(1, finishes=[finish(1, end)]))
    (message,) = everything(front)
    assert message.ack == 1


async def test_merged_steps_are_acknowledged_once_they_are_handed_on() -> None:
    """Red if the engine core, which waits for that, is told late, or before the streams have written what they got."""
    due, order = asyncio.Event(), list[str]()
    front = Session(pb.Welcome(protocol_version=1, info=info()), due.set)
    stream = front.add(add())
    everything(front)
    due.clear()

    async def read() -> None:
        await stream.changed()
        order.append("read")

    async def write() -> None:
        await due.wait()
        (message,) = everything(front)
        order.append(f"ack {message.ack}")

    tasks = [asyncio.create_task(write()), asyncio.create_task(read())]
    await asyncio.sleep(0)
    respond(front, step_output(1, tokens=[(1, 5), (1, 6)], ack_now=True))
    async with asyncio.timeout(HANG_GUARD_S):
        await asyncio.gather(*tasks)
    assert order == ["read", "ack 1"]


def test_tokens_of_aborted_requests_are_ignored() -> None:
    """Red if what was in flight during an abort reaches a reader or counts as a violation (case 1)."""
    front = session()
    stream = front.add(add())
    everything(front)
    front.abort(stream)
    respond(front, step_output(1, tokens=[(1, 5)], finishes=[finish(1, "ABORT")]))
    assert (stream.ready, stream.error, front.open_sequences) == ([], None, 0)


def test_a_welcome_without_sizes_is_refused() -> None:
    """Red if hashing by a page size of zero is left to fail later."""
    for changes in ({"page_size": 0}, {"vocab_size": 0}, {"limits": pb.Limits()}):
        with pytest.raises(ProtocolViolation):
            session(**changes)


def test_absent_fields_stay_absent() -> None:
    """Red if a default of this side travels as the client's choice."""
    message = add()
    assert [field.name for field, _ in message.ListFields()] == ["prompt_ids", "prefix_hashes", "sampling", "priority"]
    assert message.sampling.ListFields() == []


def test_every_field_arrives() -> None:
    """Red if a sampling field is forgotten on the way."""
    sampling = Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={5: -2.5},
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=(1, 2),
        ignore_eos=True,
        n=4,
        logprobs=0,
        prompt_logprobs=1,
    )
    sent = add(sampling=sampling, cache_salt="", deadline_s=1.5, label="me", priority=-3)
    for name in Sampling.__dataclass_fields__:
        value = getattr(sent.sampling, name)
        wanted = getattr(sampling, name)
        assert (tuple(value) if name == "stop_token_ids" else dict(value) if name == "logit_bias" else value) == wanted
        assert name in ("logit_bias", "stop_token_ids") or sent.sampling.HasField(name)
    assert (sent.cache_salt, sent.HasField("cache_salt")) == ("", True)
    assert (sent.deadline_s, sent.label, sent.priority) == (1.5, "me", -3)


def test_the_prefix_chain_is_the_contracts() -> None:
    """Red if the chain differs from engine.proto: prefixes would never be found, or be shared between tenants."""
    ids = np.arange(40, dtype="<i4").tobytes()
    parent = hashlib.sha256(b"greenlane.prefix.v1\x00").digest()
    first = hashlib.sha256(parent + ids[:64]).digest()
    second = hashlib.sha256(first + ids[64:128]).digest()
    assert prefix_chain(ids, 16, None) == first + second
    empty, named = (hashlib.sha256(b"greenlane.prefix.v1\x01" + salt).digest() for salt in (b"", "é".encode()))
    assert prefix_chain(ids[:64], 16, "") == hashlib.sha256(empty + ids[:64]).digest()
    assert prefix_chain(ids[:64], 16, "é") == hashlib.sha256(named + ids[:64]).digest()
