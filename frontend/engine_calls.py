"""The calls of an engine core beside its session, over whatever channel the session has now.

Owns what becomes of their failures: each is UNAVAILABLE, with a reason. Opens no channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
from greenlane.engine.v1 import engine_pb2 as pb
from greenlane.engine.v1 import engine_pb2_grpc

from access.policy import AccessError
from frontend.request import ApiError, Code

CALL_TIMEOUT_S = 5.0
Metadata = tuple[tuple[str, str], ...]


class EngineCalls:
    """Of one engine core."""

    def __init__(self, metadata: Callable[[], Metadata], unavailable: Callable[[], ApiError]) -> None:
        """`metadata`: of every call, asked for anew each time; `unavailable`: what to raise without a channel."""
        self.channel: grpc.aio.Channel | None = None
        """None: there is no connection."""
        self._metadata = metadata
        self._unavailable = unavailable

    async def get_info(self) -> pb.GetInfoResponse:
        """GetInfo of the engine core. Raises ApiError (UNAVAILABLE) when it doesn't answer."""
        answer: pb.GetInfoResponse = await self._call(
            lambda engine: engine.GetInfo(pb.GetInfoRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata())
        )
        return answer

    async def get_stats(self) -> pb.GetStatsResponse:
        """GetStats of the engine core. Raises ApiError (UNAVAILABLE) when it doesn't answer."""
        answer: pb.GetStatsResponse = await self._call(
            lambda engine: engine.GetStats(pb.GetStatsRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata())
        )
        return answer

    async def flush_cache(self) -> int:
        """Drop what the prefix cache keeps and no request refers to; the pages dropped.

        Raises ApiError (UNAVAILABLE) when the engine core doesn't answer.
        """
        answer: pb.FlushCacheResponse = await self._call(
            lambda engine: engine.FlushCache(pb.FlushCacheRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata())
        )
        return answer.pages_dropped

    def watch_cache(self) -> Any:
        """A call that reads what the engine core's prefix cache holds and what changes there; it ends with the session.

        Raises ApiError (UNAVAILABLE) without a connection, or a key for it.
        """
        if self.channel is None:
            raise self._unavailable()
        try:
            metadata = self._metadata()
        except AccessError as error:
            raise ApiError(Code.UNAVAILABLE, "the key for the engine core can't be read") from error
        return engine_pb2_grpc.EngineStub(self.channel).WatchCache(pb.WatchCacheRequest(), metadata=metadata)

    async def _call(self, start: Callable[[engine_pb2_grpc.EngineStub], Any]) -> Any:
        if self.channel is None:
            raise self._unavailable()
        try:
            return await start(engine_pb2_grpc.EngineStub(self.channel))
        except grpc.aio.AioRpcError as error:
            raise ApiError(Code.UNAVAILABLE, f"the engine core doesn't answer: {error.details()}") from error
        except AccessError as error:
            raise ApiError(Code.UNAVAILABLE, "the key for the engine core can't be read") from error
        except grpc.aio.UsageError:  # the channel was closed before the call …
            raise self._unavailable() from None
        except asyncio.CancelledError:  # … or during it, which looks like a cancellation of this task
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._unavailable() from None


def connection_remedy(details: str) -> str:
    """For the log, of an engine core that no connection comes about with; gRPC's details of why."""
    if "Socket closed" in details or "handshake failed" in details:
        return (
            "one side speaks TLS and the other doesn't, or a certificate isn't accepted (--engine-tls-ca-certs, "
            "--engine-tls-certfile); trying again"
        )
    return "waiting for an engine core there (`greenlane engine`, unless `greenlane serve` starts it), trying again"
