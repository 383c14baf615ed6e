"""A drain finishes the calls that came before it, whatever they wait for, and refuses those that come after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from frontend.openai_api import CALLS
from tests.unit.scripted_answers import HANG_GUARD_S, Site
from tests.unit.text_front import text_front
from tests.unit.vllm_front import fronting

Ask = Callable[[], Awaitable[str]]
"""A call from its beginning to its end: `done`, or `refused` because the server drains."""


@asynccontextmanager
async def completions(site: Site, body: dict[str, Any] | None = None) -> AsyncIterator[Ask]:
    async with site.client() as client:

        async def ask() -> str:
            response = await client.post("/v1/completions", json=body or {"prompt": "x"})
            return {200: "done", 503: "refused"}[response.status_code]

        yield ask


@asynccontextmanager
async def chats(site: Site) -> AsyncIterator[Ask]:
    async with site.client() as client:

        async def ask() -> str:
            body = {"messages": [{"role": "user", "content": "Who?"}]}
            response = await client.post("/v1/chat/completions", json=body)
            return {200: "done", 503: "refused"}[response.status_code]

        yield ask


@asynccontextmanager
async def text(site: Site) -> AsyncIterator[Ask]:
    async with text_front(site) as front:
        yield lambda: ended(front.generate(prompt="x"))


@asynccontextmanager
async def vllm(site: Site) -> AsyncIterator[Ask]:
    async with fronting(site.served) as front:
        yield lambda: ended(front.generate(text="x"))


async def ended(call: Any) -> str:
    """How a gRPC call ends."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return "refused" if error.code() is grpc.StatusCode.UNAVAILABLE else str(error)
    return "done"


async def first_answer(site: Site) -> None:
    """Returns in the turn of the event loop after that in which the first request began."""
    while not site.script.answers:  # noqa: ASYNC110 - turns are what is counted
        await asyncio.sleep(0)


@pytest.mark.parametrize("calls", [completions, chats, text, vllm])
async def test_a_call_that_is_being_tokenized_is_finished(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a call from before the drain is refused since its prompt is ready after it, or the drain doesn't wait for
    it; or if a later one is taken."""
    site = Site()
    reached, go = asyncio.Event(), asyncio.Event()

    async def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        reached.set()
        await go.wait()
        return [1, 2, 3]

    monkeypatch.setattr(site.served, "encode", encode)
    async with asyncio.timeout(HANG_GUARD_S), calls(site) as ask:
        early = asyncio.ensure_future(ask())
        await reached.wait()
        site.served.drain()
        assert await ask() == "refused"
        idle = asyncio.ensure_future(site.served.idle())
        await asyncio.sleep(0)
        assert not idle.done()
        go.set()
        assert await early == "done"
        await idle


async def test_calls_that_wait_for_their_turn_are_finished() -> None:
    """Red if the calls of a burst that haven't begun yet are refused, or the drain doesn't wait for them."""
    site = Site()
    count = 3 * CALLS
    async with asyncio.timeout(HANG_GUARD_S), completions(site) as ask:
        burst = [asyncio.ensure_future(ask()) for _ in range(count)]
        await first_answer(site)
        assert len(site.script.answers) <= CALLS, "the others wait for their turn"
        site.served.drain()
        await site.served.idle()
        assert len(site.script.answers) == count
        assert await ask() == "refused"
        assert await asyncio.gather(*burst) == ["done"] * count


async def test_a_call_of_many_prompts_is_finished() -> None:
    """Red if a drain cuts a call short that has begun with some of its prompts."""
    site = Site()
    count = 100
    async with asyncio.timeout(HANG_GUARD_S), completions(site, {"prompt": ["x"] * count}) as ask:
        early = asyncio.ensure_future(ask())
        await first_answer(site)
        assert len(site.script.answers) < count
        site.served.drain()
        assert await early == "done"
        assert len(site.script.answers) == count
