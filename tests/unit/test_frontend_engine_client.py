"""The engine client against a real gRPC server that a test scripts: sessions, requests, acknowledgements, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from greenlane.engine.v1 import engine_pb2 as pb

from frontend.engine_client import ClientState, EngineClient
from frontend.request import ApiError, Code, Sampling, TextRequest
from frontend.session import Session
from tests.unit.client_rig import connected_client, failure
from tests.unit.scripted_engine import (
    ScriptedEngine,
    finish,
    info,
    listening,
    socket_folder,
)

CANARY = 4_095_007


@pytest_asyncio.fixture
async def folder() -> AsyncIterator[Path]:
    async with socket_folder() as path:
        yield path


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[ScriptedEngine]:
    scripted = ScriptedEngine(info())
    async with listening(scripted, folder / "engine"):
        yield scripted


@pytest_asyncio.fixture
async def client(folder: Path, engine: ScriptedEngine) -> AsyncIterator[EngineClient]:
    async with connected_client(folder) as client:
        yield client


async def test_greets_and_learns_what_is_served(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if the client skips hello or doesn't keep the welcome's info."""
    session = await engine.session()
    await session.until(lambda: session.hello is not None)
    assert session.hello == pb.Hello(protocol_version=1, client_name="front", heartbeat_s=2.0)
    assert client.info == engine.info
    assert client.state is ClientState.SERVING


@pytest.mark.parametrize(("patience", "wanted"), [(0.5, 0.2), (5.0, 2.0), (600.0, 2.0)])
async def test_asks_for_heartbeats_that_its_patience_outlasts(
    folder: Path, engine: ScriptedEngine, patience: float, wanted: float
) -> None:
    """Red if an idle engine core isn't heard at least twice before it counts as frozen, or is only seldom."""
    client = EngineClient(f"unix:{folder / 'engine'}", engine_timeout=patience)
    await client.start()
    session = await engine.session()
    await session.until(lambda: session.hello is not None)
    assert session.hello is not None
    assert session.hello.heartbeat_s == pytest.approx(wanted)
    await client.close()


async def test_requests_of_one_turn_share_a_message(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if every add is a message of its own, or if n sequences don't claim n numbers."""
    session = await engine.session()
    await session.until(lambda: session.messages == 1)
    requests = [TextRequest([1, 2], Sampling(n=3)), TextRequest([3]), TextRequest([4])]
    streams = [await client.submit(request) for request in requests]
    await session.next_add(3)
    assert [add.number for add in session.adds] == [1, 4, 5] == [stream.number for stream in streams]
    assert session.messages == 2


async def test_an_abort_before_the_send_sends_nothing(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a request that never left is sent anyway, or aborted in the engine core."""
    session = await engine.session()
    gone = await client.submit(TextRequest([1]))
    client.abort(gone)
    await client.submit(TextRequest([2]))
    add = await session.next_add()
    assert (add.number, session.aborts) == (2, [])
    assert client.open_sequences == 1


async def test_aborts_are_sent_once(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if abort isn't idempotent, forgets a sequence of n, or aborts one that has finished."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1], Sampling(n=3)))
    await session.next_add()
    await session.send(finishes=[finish(2)])
    while not stream.ready:
        await stream.changed()
    client.abort(stream)
    client.abort(stream)
    await client.submit(TextRequest([2]))
    await session.next_add(2)
    assert session.aborts == [1, 3]


async def test_acknowledges_before_the_bound_and_not_every_step(folder: Path) -> None:
    """Red if acks come with every output, or so late that the engine core would end the session."""
    served = info()
    served.limits.max_unacked_bytes = 4000
    engine = ScriptedEngine(served)
    async with listening(engine, folder / "engine") as address:
        client = EngineClient(address)
        await client.start()
        await client.serving()
        session = await engine.session()
        stream = await client.submit(TextRequest([1]))
        await session.next_add()
        for token in range(300):  # about 20 bytes each
            await session.send(tokens=[(1, token)])
            await session.until(lambda: (session.sent - session.ack) * 20 < 4000)
        await session.send(finishes=[finish(1)])
        await session.until(lambda: session.ack == 301)
        assert session.acks < 60
        while not (stream.ready and stream.ready[0].finished):
            await stream.changed()
        assert stream.ready[0].tokens == list(range(300))
        await client.close()


async def test_a_heartbeat_is_answered_with_what_is_unacknowledged(
    client: EngineClient, engine: ScriptedEngine
) -> None:
    """Red if an idle session leaves its last output unacknowledged while requests are open."""
    session = await engine.session()
    await client.submit(TextRequest([1]))
    await session.next_add()
    await session.send(tokens=[(1, 5)])
    await session.write(pb.SessionResponse())
    await session.until(lambda: session.ack == 1)


async def test_an_unread_answer_is_bounded(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a reader that never reads makes the frontend keep everything, or if one big message alone fails it."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1], Sampling(n=128, logprobs=20)))
    assert stream.unread_limit == 256
    await session.next_add()
    await session.send(tokens=[(1, 7)] * 1000)
    await session.send(tokens=[(2, 7)])
    while len(stream.ready) < 2:
        await stream.changed()
    assert stream.error is None
    await session.send(tokens=[(1, 7)])
    assert (await failure(stream)).code is Code.RESOURCE_EXHAUSTED
    await session.until(lambda: sorted(session.aborts) == list(range(1, 129)))


async def test_the_other_calls(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a pass-through calls the wrong method."""
    assert await client.calls.get_info() == engine.info
    assert (await client.calls.get_stats()).uptime_s == 1.0


async def test_close_fails_what_is_open(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if stopping the frontend leaves a reader waiting."""
    stream = await client.submit(TextRequest([1]))
    await client.close()
    assert (await failure(stream)).code is Code.UNAVAILABLE
    with pytest.raises(ApiError):
        await client.calls.get_stats()


async def test_long_prompts_arrive_hashed(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a prompt beyond the inline bound loses its order, its hashes or its place."""
    session = await engine.session()
    prompt = [index % 4096 for index in range(20_000)]
    stream = await client.submit(TextRequest(prompt))
    add = await session.next_add()
    assert np.frombuffer(add.prompt_ids, "<i4").tolist() == prompt
    assert len(add.prefix_hashes) == 32 * (20_000 // 16)
    assert stream.number == add.number


async def test_a_message_at_the_limit_arrives_and_one_beyond_ends_the_session(
    client: EngineClient, engine: ScriptedEngine
) -> None:
    """Case 20. Red if the client's own limit is below the contract's, or an oversized message is let in."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()
    await session.send(tokens=[(1, 7)] * 87_000)  # 12 bytes each
    while not stream.ready:
        await stream.changed()
    assert len(stream.ready[0].tokens) == 87_000
    oversized = asyncio.create_task(session.send(tokens=[(1, 7)] * 88_000))
    assert (await failure(stream)).code is Code.UNAVAILABLE
    await asyncio.gather(oversized, return_exceptions=True)  # the client may leave before it is written
    await engine.session()


async def test_a_fault_of_our_own_fails_the_requests(
    client: EngineClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red if an unforeseen exception in the reading task leaves requests waiting for ever."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()

    def broken(self: Session, output: pb.StepOutput) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(Session, "_apply", broken)
    await session.send(tokens=[(1, 7)])
    error = await failure(stream)
    assert (error.code, "ZeroDivisionError" in error.message) == (Code.UNAVAILABLE, True)
    await engine.session()


async def test_a_listener_that_fails_holds_nothing_up(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a broken health service keeps requests from failing."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()

    async def broken(state: ClientState) -> None:
        raise RuntimeError(state.value)

    client.on_state(broken)
    session.end()
    assert (await failure(stream)).code is Code.UNAVAILABLE
    await engine.session()


async def test_logs_hold_no_prompt(
    client: EngineClient, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Red if a log line holds what a client sent."""
    caplog.set_level(logging.DEBUG)
    session = await engine.session()
    stream = await client.submit(TextRequest([CANARY % 4096] * 50, label="canary-label", cache_salt="canary-salt"))
    await session.next_add()
    session.end(grpc.StatusCode.INTERNAL, "broken")
    await failure(stream)
    await engine.session()
    text = caplog.text
    assert "broken" in text
    assert "canary" not in text
    assert str(CANARY % 4096) not in text
