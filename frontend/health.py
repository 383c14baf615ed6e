"""grpc.health.v1 of a frontend: one status, told to every watcher before `tell` returns.

Owns the open Watch calls. grpcio's own asyncio servicer isn't used: it forgets the other watchers of a service when
one of them leaves, and waits without bound for one that doesn't read.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
TELL_S = 0.25
"""How long `tell` waits for watchers that don't read."""


class _Watcher:
    """One open Watch call: `changed` asks it to look again, `told` is set once it has written what it saw."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.told = asyncio.Event()


class HealthService:
    """The same status for every named service and for "", the server as a whole; NOT_SERVING at first."""

    def __init__(self, *services: str) -> None:
        self._services = frozenset(("", *services))
        self._status = NOT_SERVING
        self._watchers: dict[_Watcher, None] = {}

    async def tell(self, serving: bool) -> None:
        """Set the status; returns when every watcher has been told, or after TELL_S."""
        status = SERVING if serving else NOT_SERVING
        watchers = list(self._watchers)
        if status != self._status:
            self._status = status
            for watcher in watchers:
                watcher.told.clear()
                watcher.changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_S):
                for watcher in watchers:
                    await watcher.told.wait()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """The status now and at every change; SERVICE_UNKNOWN for a service that isn't here."""
        known = request.service in self._services
        watcher = _Watcher()
        self._watchers[watcher] = None
        try:
            while True:
                watcher.changed.clear()
                await context.write(health_pb2.HealthCheckResponse(status=self._status if known else SERVICE_UNKNOWN))
                if not watcher.changed.is_set():
                    watcher.told.set()
                await watcher.changed.wait()
        finally:
            del self._watchers[watcher]
            watcher.told.set()
