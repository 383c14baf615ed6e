"""A client of an engine core that a test scripts, for what `generate` makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from frontend.engine_client import EngineClient
from frontend.generate import Generation, generate
from frontend.request import Delta, TextRequest
from frontend.tokenizer import Tokenizer
from tests.unit.scripted_engine import (
    HANG_GUARD_S,
    ScriptedEngine,
    ScriptedSession,
    info,
    listening,
    socket_folder,
)


class Bench:
    """A connected client and the session as the engine core sees it."""

    def __init__(self, client: EngineClient, session: ScriptedSession, tokenizer: Tokenizer) -> None:
        self.client = client
        self.session = session
        self.tokenizer = tokenizer

    async def begin(self, text: str = "Hello", **fields: Any) -> Generation:
        """A generation whose request has reached the engine core; reads start with `read`."""
        request = TextRequest(self.tokenizer.encode_inline(text), **fields)
        generation = generate(self.client, self.tokenizer, request)
        accepting = asyncio.create_task(generation.accepted())
        add = await self.session.next_add(len(self.session.adds) + 1)
        await self.session.send(accepted=[add.number])
        await accepting
        return generation

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode_inline(text)

    async def say(self, text: str, number: int = 1, one_by_one: bool = True) -> list[int]:
        """Send a text's tokens, each in a step of its own or all in one."""
        ids = self.ids(text)
        for step in [[token] for token in ids] if one_by_one else [ids]:
            await self.session.send(tokens=[(number, token) for token in step])
        return ids


@asynccontextmanager
async def connected_bench(tokenizer: Tokenizer) -> AsyncIterator[Bench]:
    engine = ScriptedEngine(info())
    async with socket_folder() as folder, listening(engine, folder / "engine") as address:
        client = EngineClient(address)
        await client.start()
        async with asyncio.timeout(HANG_GUARD_S):
            await client.serving()
            yield Bench(client, await engine.session(), tokenizer)
        await client.close()


async def read(generation: Generation) -> list[Delta]:
    return [delta async for deltas in generation for delta in deltas]


def text_of(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


async def settled(bench: Bench) -> list[int]:
    """The aborts that reached the engine core, once everything sent before now has."""
    marker = await bench.client.submit(TextRequest([1]))
    await bench.session.until(lambda: any(add.number == marker.number for add in bench.session.adds))
    bench.client.abort(marker)
    return [number for number in bench.session.aborts if number != marker.number]
