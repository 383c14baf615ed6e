"""An engine client for tests: its clock, its session, and how long it takes to notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from frontend.engine_client import ClientState, EngineClient
from frontend.request import ApiError
from frontend.streams import RequestStream
from tests.unit.scripted_engine import (
    HANG_GUARD_S,
)


class ManualClock:
    """Stands still until told; sleepers wake when their moment has come."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        self._sleepers.append((self._now + seconds, event))
        await event.wait()

    def advance(self, seconds: float) -> None:
        self._now += seconds
        for due, event in self._sleepers:
            if due <= self._now:
                event.set()


@asynccontextmanager
async def connected_client(folder: Path) -> AsyncIterator[EngineClient]:
    """A client with a session of the engine core that listens in `folder`."""
    client = EngineClient(f"unix:{folder / 'engine'}", client_name="front")
    await client.start()
    async with asyncio.timeout(HANG_GUARD_S):
        await client.serving()
    yield client
    await client.close()


async def state_of(client: EngineClient, wanted: ClientState) -> None:
    """Wait until the client is in a state."""
    reached = asyncio.Event()

    async def listener(state: ClientState) -> None:
        if state is wanted:
            reached.set()

    client.on_state(listener)
    if client.state is not wanted:
        async with asyncio.timeout(HANG_GUARD_S):
            await reached.wait()


async def failure(stream: RequestStream) -> ApiError:
    """Wait until a request has failed."""
    async with asyncio.timeout(HANG_GUARD_S):
        while stream.error is None:
            await stream.changed()
    return stream.error
