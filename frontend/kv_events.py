"""What the engine cores' prefix caches hold, as the KV events of smg's contracts.

Owns the order and the numbers. A subscription goes on behind the number that the subscriber names, with an
all-cleared if it may know anything: this side keeps no history, the engine cores tell what they hold. Where one of them
is lost, or a reader fell behind, all is cleared and told anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc.aio
import numpy as np
from greenlane.engine.v1 import engine_pb2
from smg_grpc_proto.generated import common_pb2 as common

from frontend.request import ApiError

logger = logging.getLogger(__name__)

LINK_BYTES = 32
HASH_BYTES = 8
"""Of a link, in the block hashes of this contract."""
RETRY_S = 1.0
"""Before everything is told anew."""


class Core(Protocol):
    """What is needed of an engine core (`engine_client.EngineClient`)."""

    async def serving(self) -> None:
        """Wait until there is a session."""

    def watch_cache(self) -> Any:
        """A WatchCache call. Raises ApiError without a session."""


class KvEvents:
    """One subscription's events."""

    def __init__(self, cores: Sequence[Core], after: int) -> None:
        """`after`: the last sequence number that the subscriber has, 0 for none."""
        self.sequence = after
        """Of the newest batch."""
        self._cores = cores
        self._events = 0
        self._known = after > 0
        """Whether the subscriber may know any block."""
        self._arrived: asyncio.Queue[list[Any]] = asyncio.Queue(1)
        self._reader: asyncio.Task[None] | None = None

    async def next(self, timeout_s: float) -> Any | None:
        """The next KvEventBatch; None when none came in that time."""
        try:
            async with asyncio.timeout(timeout_s):
                events = await self._arrived.get()
        except TimeoutError:
            if self._reader is not None and self._reader.done():
                self._reader.result()
            return None
        self.sequence += 1
        return common.KvEventBatch(sequence_number=self.sequence, timestamp=time.time(), events=events)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read from the engine cores as long as this is open."""
        self._reader = asyncio.create_task(self._run(), name="kv events")
        try:
            yield
        finally:
            await _end([self._reader])

    async def _run(self) -> None:
        """Tell everything, then what changes, from the beginning each time that an engine core's story breaks off."""
        while True:
            if self._known:
                await self._arrived.put([self._numbered(cleared=common.KvCacheCleared())])
                self._known = False
            readers = [asyncio.create_task(self._read(core)) for core in self._cores]
            try:
                await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end(readers)
            await asyncio.sleep(RETRY_S)

    async def _read(self, core: Core) -> None:
        """One engine core's changes, until its stream ends. A core that has none to tell is waited on for ever."""
        await core.serving()
        try:
            async for changes in _changes(core):
                self._known = True
                await self._arrived.put([self._event(change) for change in changes.changes])
        except ApiError as error:
            logger.debug("no cache events: %s", error.message)
        except grpc.aio.AioRpcError as error:
            logger.info("cache events broke off: %s: %s", error.code().name, error.details())
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                await asyncio.Event().wait()

    def _event(self, change: engine_pb2.CacheChange) -> Any:
        if change.WhichOneof("change") == "removed":
            return self._numbered(removed=common.KvBlocksRemoved(block_hashes=_hashes(change.removed)))
        stored = change.stored
        hashes = _hashes(stored.links)
        ids = np.frombuffer(stored.ids, "<u4").reshape(len(hashes), -1)
        blocks = [
            common.KvBlock(block_hash=hash, token_ids=page, block_size=len(page))
            for hash, page in zip(hashes, ids.tolist(), strict=True)
        ]
        told = common.KvBlocksStored(blocks=blocks)
        if stored.HasField("parent"):
            (told.parent_block_hash,) = _hashes(stored.parent)
        if stored.HasField("cache_salt"):
            told.cache_salt = stored.cache_salt
        return self._numbered(stored=told)

    def _numbered(self, **data: Any) -> Any:
        self._events += 1
        return common.KvCacheEvent(event_id=self._events, **data)


async def _changes(core: Core) -> AsyncIterator[engine_pb2.CacheChanges]:
    """A core's messages; ends with the session. Raises ApiError or AioRpcError."""
    call = core.watch_cache()
    try:
        async for message in call:
            yield message
    except (grpc.aio.UsageError, asyncio.CancelledError):  # the channel was closed, which may look like a cancellation
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
    finally:
        call.cancel()


def _hashes(links: bytes) -> list[int]:
    """The first bytes of each link, as int64."""
    hashes: list[int] = np.frombuffer(links, "<i8")[:: LINK_BYTES // HASH_BYTES].tolist()
    return hashes


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what still runs; what has failed by itself raises."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
