"""KV events for gateways, from scripted engine cores and from a real one with the fake device."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from greenlane.engine.v1 import engine_pb2
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2 as common

from engine_core.service import MAX_WATCHES
from frontend import kv_events
from frontend.kv_events import KvEvents
from frontend.request import ApiError, Code
from tests.unit.core_process import GUARD_S, Core, guarded
from tests.unit.vllm_front import connected, fronting

PAGE = 16


def link(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def hashed(number: int) -> int:
    return int.from_bytes(link(number)[:8], "little", signed=True)


def stored(*numbers: int, parent: int | None = None, salt: str | None = None) -> engine_pb2.CacheChanges:
    """Pages of two tokens, named by numbers."""
    pages = engine_pb2.StoredPages(
        links=b"".join(map(link, numbers)),
        ids=np.array([[number, 70_000 + number] for number in numbers], "<i4").tobytes(),
        parent=None if parent is None else link(parent),
        cache_salt=salt,
    )
    return engine_pb2.CacheChanges(changes=[engine_pb2.CacheChange(stored=pages)])


def removed(*numbers: int) -> engine_pb2.CacheChanges:
    return engine_pb2.CacheChanges(changes=[engine_pb2.CacheChange(removed=b"".join(map(link, numbers)))])


class ScriptedCall:
    """One WatchCache call: its messages as the test puts them; None ends it."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[engine_pb2.CacheChanges | None] = asyncio.Queue()
        self.cancelled = False

    def __aiter__(self) -> ScriptedCall:
        return self

    async def __anext__(self) -> engine_pb2.CacheChanges:
        message = await self.messages.get()
        if message is None:
            raise StopAsyncIteration
        return message

    def cancel(self) -> None:
        self.cancelled = True


class ScriptedCore:
    """An engine core whose cache a test tells."""

    def __init__(self) -> None:
        self.there = asyncio.Event()
        self.there.set()
        self.calls: list[ScriptedCall] = []
        self.failure: ApiError | None = None

    async def serving(self) -> None:
        await self.there.wait()

    def watch_cache(self) -> Any:
        if self.failure is not None:
            raise self.failure
        self.calls.append(ScriptedCall())
        return self.calls[-1]

    async def tell(self, *messages: engine_pb2.CacheChanges | None, call: int = -1) -> None:
        while not self.calls:  # noqa: ASYNC110 - waits for another task, whatever it does
            await asyncio.sleep(0.001)
        for message in messages:
            self.calls[call].messages.put_nowait(message)


async def batch(events: KvEvents) -> Any:
    got = await events.next(GUARD_S)
    assert got is not None
    return got


async def test_stored_and_removed() -> None:
    """Red when a block has another hash, parent, salt or other tokens than its page, or numbers aren't in a row."""
    core = ScriptedCore()
    events = KvEvents([core], 0)
    async with events.reading():
        await core.tell(stored(1, 2), stored(3, parent=2, salt="tenant"), removed(3, 2))
        first, second, third = [await batch(events) for _ in range(3)]
    assert [each.sequence_number for each in (first, second, third)] == [1, 2, 3]
    (told,) = first.events
    assert not told.stored.HasField("parent_block_hash")
    assert not told.stored.HasField("cache_salt")
    assert [(each.block_hash, list(each.token_ids), each.block_size) for each in told.stored.blocks] == [
        (hashed(1), [1, 70_001], 2),
        (hashed(2), [2, 70_002], 2),
    ]
    (told,) = second.events
    assert (told.stored.parent_block_hash, told.stored.cache_salt) == (hashed(2), "tenant")
    (told,) = third.events
    assert list(told.removed.block_hashes) == [hashed(3), hashed(2)]
    assert core.calls[0].cancelled


async def test_a_subscriber_that_comes_again() -> None:
    """Red when a gateway keeps what it knew of another time, or takes what follows for old news: numbers go on."""
    core = ScriptedCore()
    events = KvEvents([core], 41)
    async with events.reading():
        await core.tell(stored(1))
        cleared, told = await batch(events), await batch(events)
    assert (cleared.sequence_number, told.sequence_number) == (42, 43)
    assert cleared.events[0].HasField("cleared")


async def test_a_lost_core_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when blocks of a core that is gone stay known, or the other core's are forgotten with them."""
    monkeypatch.setattr(kv_events, "RETRY_S", 0.0)
    one, other = ScriptedCore(), ScriptedCore()
    events = KvEvents([one, other], 0)
    async with events.reading():
        await one.tell(stored(1))
        await batch(events)
        await other.tell(stored(2))
        await batch(events)
        one.there.clear()
        one.failure = ApiError(Code.UNAVAILABLE, "gone")
        await one.tell(None)
        cleared = await batch(events)
        assert [each.WhichOneof("data") for each in cleared.events] == ["cleared"]
        assert cleared.sequence_number == 3
        while len(other.calls) < 2:  # noqa: ASYNC110 - waits for another task, whatever it does
            await asyncio.sleep(0.001)
        await other.tell(stored(2))
        assert (await batch(events)).events[0].stored.blocks[0].block_hash == hashed(2)


async def test_a_fault_is_not_swallowed() -> None:
    """Red when a subscriber waits for ever for events that can't come."""
    core = ScriptedCore()
    events = KvEvents([core], 0)

    async def read() -> None:
        async with events.reading():
            ragged = engine_pb2.StoredPages(links=link(1) * 2, ids=b"\0" * 12)
            await core.tell(engine_pb2.CacheChanges(changes=[engine_pb2.CacheChange(stored=ragged)]))
            while True:
                await events.next(0.01)

    with pytest.raises(ValueError, match="reshape"):
        await guarded(read())


# ------------------------------ a real engine core


@pytest.fixture(scope="module")
def core() -> Iterator[Core]:
    with tempfile.TemporaryDirectory(prefix="greenlane-test-") as folder:
        core = Core(Path(folder), "--max-num-seqs=4", "--kv-cache-memory=64MiB", f"--page-size={PAGE}")
        asyncio.run(core.ready())
        yield core
        core.close()


class Subscriber:
    """Reads a subscription as a gateway does: an index of blocks, numbers in a row."""

    def __init__(self, call: Any, after: int = 0) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.sequence = after
        self._call = call

    async def read(self) -> None:
        got = await guarded(self._call.read())
        if got.load.load_only:
            assert got.sequence_number == self.sequence
            return
        self.sequence += 1
        assert got.sequence_number == self.sequence
        for event in got.events:
            match event.WhichOneof("data"):
                case "stored":
                    if event.stored.HasField("parent_block_hash"):
                        assert event.stored.parent_block_hash in self.blocks
                    self.blocks |= {each.block_hash: list(each.token_ids) for each in event.stored.blocks}
                case "removed":
                    for block_hash in event.removed.block_hashes:
                        self.blocks.pop(block_hash, None)
                case "cleared":
                    self.blocks.clear()

    async def until(self, blocks: int) -> None:
        while len(self.blocks) != blocks:
            await self.read()


@pytest.fixture
async def front(core: Core) -> AsyncIterator[Any]:
    async with connected(f"unix:{core.folder / 'grpc.sock'}") as served, fronting(served) as front:
        await front.engine.FlushCache(common.FlushCacheRequest())
        yield front


@pytest.mark.e2e
async def test_a_cache_as_a_gateway_sees_it(front: Any) -> None:
    """Red when the blocks told aren't those of the prefix cache: of a prompt, of its answer, after a flush, to a second
    subscriber, and to the first when it comes again."""
    request = common.SubscribeKvEventsRequest(load_records_before_first_batch=True)
    first = Subscriber(front.engine.SubscribeKvEvents(request))
    prompt = list(range(100, 100 + 3 * PAGE))
    await front.answer(tokenized=pb.TokenizedInput(input_ids=prompt), max_tokens=PAGE + 1, ignore_eos=True)
    await first.until(4)
    assert [each for block in first.blocks.values() for each in block][: len(prompt)] == prompt
    stats = await front.served.engine_stats()
    assert stats.gauges.pages_cached + stats.gauges.pages_retiring == 4
    second = Subscriber(front.engine.SubscribeKvEvents(common.SubscribeKvEventsRequest()))
    await second.until(4)
    assert second.blocks == first.blocks
    await front.engine.FlushCache(common.FlushCacheRequest())
    await first.until(0)
    await front.answer(tokenized=pb.TokenizedInput(input_ids=prompt[:PAGE]), max_tokens=1)
    again = Subscriber(
        front.engine.SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=second.sequence)),
        second.sequence,
    )
    again.blocks = dict(second.blocks)
    await again.read()
    assert again.blocks == {}
    await again.until(1)


@pytest.mark.e2e
async def test_too_many_watchers_are_refused(front: Any) -> None:
    """Red when readers of the cache pile up without a bound, or a place isn't given back."""
    await front.answer(tokenized=pb.TokenizedInput(input_ids=range(PAGE)), max_tokens=1)
    (client,) = front.served.engine_cores
    calls = [client.watch_cache() for _ in range(MAX_WATCHES + 1)]
    ends = [asyncio.ensure_future(call.code()) for call in calls]
    done, _ = await asyncio.wait(ends, timeout=GUARD_S, return_when=asyncio.FIRST_COMPLETED)
    assert [end.result() for end in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
    for call in calls:
        call.cancel()
    await asyncio.wait(ends)

    async def place() -> None:
        while True:
            call = client.watch_cache()
            try:
                message = await call.read()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                continue
            assert len(message.changes) == 1
            call.cancel()
            return

    await guarded(place())
