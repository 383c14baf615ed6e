"""WatchCache without gRPC: a watch's changes as messages, gathered and bounded.

Owns the pace. The engine thread is asked only when there is something to tell, for a bounded piece each time, and the
next piece is taken when the reader has taken the one before: who reads slowly falls behind alone, up to the watch's
bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from greenlane.engine.v1 import engine_pb2 as pb

from engine_core.cache.watch import CacheWatch, RemovedPages, StoredPages
from engine_core.errors import StatusCode
from engine_core.request import MAX_SALT_BYTES, PREFIX_HASH_BYTES
from engine_core.session import SessionBroken

GATHER_S = 0.1
"""Changes of this time go together."""
PIECE_CHANGES = 128
"""What the engine thread looks through at a time, between two steps: about 0.2 ms."""
PIECE_BYTES = 256 << 10
"""Of one message, at most."""
RUN_BYTES = MAX_SALT_BYTES + PREFIX_HASH_BYTES + 32
"""What a page takes that is a chain of its own, beside its link and ids."""


class Core(Protocol):
    """What is needed of the engine thread."""

    async def read_cache(self, watch: CacheWatch, most: int) -> list[StoredPages | RemovedPages]:
        """The oldest `most` changes of a watch."""


async def changes(
    core: Core, watch: CacheWatch, page_size: int, ended: asyncio.Event
) -> AsyncIterator[pb.CacheChanges]:
    """Messages until `ended` is set. Raises SessionBroken (DATA_LOSS) when the reader has fallen too far behind."""
    most = min(PIECE_CHANGES, PIECE_BYTES // (RUN_BYTES + PREFIX_HASH_BYTES + 4 * page_size))
    while not ended.is_set():
        if watch.lost:
            raise SessionBroken(
                StatusCode.DATA_LOSS, "changes were dropped, since they were read too slowly: begin anew"
            )
        if len(watch):
            told = await core.read_cache(watch, most)
            if told:
                yield message(told)
        if not len(watch):
            await _wait(ended)


async def _wait(ended: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(GATHER_S):
            await ended.wait()
    except TimeoutError:
        pass


def message(told: Iterable[StoredPages | RemovedPages]) -> pb.CacheChanges:
    """These changes, in order."""
    answer = pb.CacheChanges()
    for change in told:
        if isinstance(change, RemovedPages):
            answer.changes.add(removed=b"".join(change.links))
            continue
        answer.changes.add(
            stored=pb.StoredPages(
                parent=change.parent,
                links=b"".join(change.links),
                ids=b"".join(change.ids),
                cache_salt=None if change.salt is None else change.salt.decode(),
            )
        )
    return answer
