"""A frontend that doesn't read its session for a while: what the engine core may send, and what is heard afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from greenlane.engine.v1 import engine_pb2 as pb

from frontend.engine_client import ClientState, EngineClient
from frontend.request import TextRequest
from frontend.streams import RequestStream
from tests.unit.scripted_engine import (
    HANG_GUARD_S,
    ScriptedEngine,
    ScriptedSession,
    info,
    listening,
    socket_folder,
)


@dataclass
class Unread:
    """A session with one request, of which the client reads nothing until `reading` is set."""

    client: EngineClient
    session: ScriptedSession
    stream: RequestStream
    reading: asyncio.Event


@pytest_asyncio.fixture
async def unread(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Unread]:
    reading = asyncio.Event()
    read = EngineClient._read

    async def read_when_told(client: EngineClient, call: object) -> pb.SessionResponse:
        if client.state is ClientState.SERVING:
            await reading.wait()
        return await read(client, call)

    monkeypatch.setattr(EngineClient, "_read", read_when_told)
    engine = ScriptedEngine(info())
    async with socket_folder() as folder, listening(engine, folder / "engine") as address:
        client = EngineClient(address)
        await client.start()
        async with asyncio.timeout(HANG_GUARD_S):
            await client.serving()
        session = await engine.session()
        stream = await client.submit(TextRequest([1]))
        await session.next_add()
        yield Unread(client, session, stream, reading)
        await client.close()


async def test_steps_wait_in_the_engine_core_while_nobody_reads(unread: Unread) -> None:
    """Red if steps pile up on the way to a frontend that is behind, where they can't merge any more."""

    async def send(steps: int) -> None:
        for _ in range(steps):
            await unread.session.send(tokens=[(1, 7)] * 256)

    sending = asyncio.create_task(send(8))
    await asyncio.wait([sending], timeout=1.0)
    assert unread.session.sent <= 2, "the first is on its way, the second waits to be written"
    unread.reading.set()
    async with asyncio.timeout(HANG_GUARD_S):
        await sending


async def test_the_reason_for_a_sessions_end_is_heard_while_writing(unread: Unread) -> None:
    """Red if a message that can't be sent any more hides the status with which the engine core ended the session."""
    await unread.session.send(tokens=[(1, 7)])
    unread.session.end(grpc.StatusCode.RESOURCE_EXHAUSTED, "read and acknowledge faster")
    for _ in range(20):  # until the end has come as far as this side's transport
        await asyncio.sleep(0.02)
        await unread.client.submit(TextRequest([1]))
    unread.reading.set()
    async with asyncio.timeout(HANG_GUARD_S):
        while unread.stream.error is None:
            await unread.stream.changed()
    assert "RESOURCE_EXHAUSTED: read and acknowledge faster" in unread.stream.error.message
