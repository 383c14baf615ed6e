"""The health servicer's promise: when `set` returns, watchers have been told, or their time is over."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2

from engine_core.health import NOT_SERVING, SERVING, Health

GUARD_S = 30.0


class Context:
    """A call whose client takes a message only while `reading` is set."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.writing = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()

    async def write(self, response: Any) -> None:
        self.writing.set()
        await self.reading.wait()
        self.sent.append(response.status)


async def watched(health: Health) -> tuple[Context, asyncio.Task[None]]:
    context: Any = Context()
    task = asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(), context))
    await asyncio.wait_for(context.writing.wait(), GUARD_S)
    return context, task


async def test_set_returns_when_the_watcher_has_been_told() -> None:
    """Red when `set` doesn't wait: sessions would be failed before health is known to have turned."""
    health = Health()
    context, task = await watched(health)
    context.reading.clear()
    context.writing.clear()
    setting = asyncio.create_task(health.set(SERVING))
    await asyncio.wait_for(context.writing.wait(), GUARD_S)
    assert not setting.done()
    context.reading.set()
    await asyncio.wait_for(setting, GUARD_S)
    assert context.sent == [NOT_SERVING, SERVING]
    task.cancel()


async def test_a_watcher_that_never_reads_delays_nobody_for_long() -> None:
    """Red when one frozen watcher keeps a dying engine from failing its requests."""
    health = Health()
    frozen, first = await watched(health)
    reader, second = await watched(health)
    frozen.reading.clear()
    await asyncio.wait_for(health.set(SERVING), GUARD_S)
    await asyncio.wait_for(health.set(NOT_SERVING), GUARD_S)
    assert reader.sent == [NOT_SERVING, SERVING, NOT_SERVING]
    assert frozen.sent == [NOT_SERVING]
    frozen.reading.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert frozen.sent == [NOT_SERVING, SERVING, NOT_SERVING]
    first.cancel()
    second.cancel()


async def test_a_watcher_that_leaves_while_it_is_told_releases_set() -> None:
    """Red when `set` waits out its bound for a client that is gone."""
    health = Health()
    context, task = await watched(health)
    context.reading.clear()
    context.writing.clear()
    setting = asyncio.create_task(health.set(SERVING))
    await asyncio.wait_for(context.writing.wait(), GUARD_S)
    task.cancel()
    await asyncio.wait_for(setting, GUARD_S)
    await asyncio.wait_for(health.set(NOT_SERVING), GUARD_S)
