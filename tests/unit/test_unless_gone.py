"""A call's work, its client, and whoever stops the server: which of them ends it, and how that is told apart."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frontend.http_server import BodyBudget, ClientGone, Exchange


class Client:
    """Stays until it leaves."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        pass

    def exchange(self) -> Exchange:
        scope = {"path": "/", "headers": []}
        return Exchange(scope, self.receive, self.send, BodyBudget(1))


async def test_work_ends_with_its_client() -> None:
    """Red if work goes on for nobody, or the caller counts as cancelled afterwards: then it can't wait any more."""
    client, ended = Client(), asyncio.Event()

    async def work() -> None:
        client.leaves.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(ClientGone):
        await client.exchange().unless_gone(work())
    assert ended.is_set()
    assert not task.cancelling()
    await asyncio.sleep(0)


async def test_a_client_that_leaves_behind_the_answer_ends_nothing() -> None:
    """Red if the connection's end, which comes with the answer's, cancels the caller."""
    client = Client()

    async def work() -> None:
        await asyncio.sleep(0)
        client.leaves.set()

    await client.exchange().unless_gone(work())
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_stopped_call_is_no_client_that_left() -> None:
    """Red if a cancellation from outside is taken for the client's, or swallowed."""
    client = Client()
    task = asyncio.create_task(client.exchange().unless_gone(asyncio.sleep(3600)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_work_runs_in_its_callers_task() -> None:
    """Red if every call costs a task of its own beside the one that watches the client."""
    seen: list[asyncio.Task[Any] | None] = []

    async def work() -> None:
        seen.append(asyncio.current_task())

    await Client().exchange().unless_gone(work())
    assert seen == [asyncio.current_task()]
