"""grpc.health.v1 for the engine core, with one promise more than grpcio's own servicer makes.

`set` returns once every open Watch has been told (within a bound), so that a change of health can come before the
failures that it explains. grpcio's asyncio servicer can't be used: it forgets the remaining watchers of a service when
one of them leaves, and its `set` waits without bound for a watcher that doesn't read.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2

SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
DELIVERY_S = 0.25
"""How long `set` waits for watchers that don't read."""


class _Watcher:
    """One open Watch call: `changed` asks it to look again, `told` is done once it has written what it saw."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Health:
    """One status for all the named services; "" (the server as a whole) is always one of them."""

    def __init__(self, *services: str) -> None:
        self._services = {"", *services}
        self._status = NOT_SERVING
        self._watchers: dict[_Watcher, None] = {}

    async def set(self, status: int) -> None:
        """Change the status and tell every watcher before returning, within `DELIVERY_S`."""
        if status == self._status:
            return
        self._status = status
        told = []
        for watcher in self._watchers:
            watcher.told = asyncio.get_running_loop().create_future()
            watcher.changed.set()
            told.append(watcher.told)
        if told:
            await asyncio.wait(told, timeout=DELIVERY_S)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The status now, then each later one that differs from the last one sent."""
        known = request.service in self._services
        watcher = _Watcher()
        self._watchers[watcher] = None
        sent: int | None = None
        try:
            while True:
                watcher.changed.clear()
                told, status = watcher.told, self._status if known else SERVICE_UNKNOWN
                if status != sent:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                if not told.done():
                    told.set_result(None)
                await watcher.changed.wait()
        finally:
            del self._watchers[watcher]
            if not watcher.told.done():
                watcher.told.set_result(None)
