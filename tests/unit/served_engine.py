"""The engine core's gRPC service on a real socket over a scripted engine, and a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
from greenlane.engine.v1 import engine_pb2 as pb
from greenlane.engine.v1 import engine_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_core.cache.watch import CacheWatch, RemovedPages, StoredPages
from engine_core.health import Health
from engine_core.request import CloseSession, Command, ModelLimits
from engine_core.server import bind, build_server
from engine_core.service import ENGINE_SERVICE, EngineService

LIMITS = ModelLimits(vocab_size=1000, max_model_len=1 << 20, page_size=16, total_pages=64)
INFO = pb.GetInfoResponse(model="tiny", vocab_size=1000)
GUARD_S = 30.0
OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 1 << 20)]
HELLO = pb.SessionRequest(hello=pb.Hello(protocol_version=1, client_name="test"))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class ScriptedCore:
    """Keeps what the service hands over; answers as told."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.drained: list[float] = []
        self.fields: dict[str, int] = {}
        self.error: Exception | None = None
        self.crowded = False

    def submit(self, commands: Iterable[Command]) -> None:
        self.commands.extend(commands)

    async def room(self) -> None:
        while self.crowded:  # noqa: ASYNC110 - a double, not the product
            await asyncio.sleep(0.001)

    async def stats(self) -> Any:
        if self.error is not None:
            raise self.error
        names = [field.name for message in (pb.Gauges, pb.Counters) for field in message.DESCRIPTOR.fields]
        return SimpleNamespace(**(dict.fromkeys(names, 0) | self.fields))

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        self.drained.append(timeout_s)
        return 3, 1

    async def flush_cache(self) -> int:
        return 5

    async def watch_cache(self) -> CacheWatch:
        raise NotImplementedError

    async def read_cache(self, watch: CacheWatch, most: int) -> list[StoredPages | RemovedPages]:
        raise NotImplementedError

    def unwatch_cache(self, watch: CacheWatch) -> None:
        raise NotImplementedError

    def closed(self) -> list[int]:
        return [command.session for command in self.commands if isinstance(command, CloseSession)]


class Rig:
    """A served EngineService and a client channel to it."""

    def __init__(self, core: ScriptedCore, service: EngineService, channel: grpc.aio.Channel) -> None:
        self.core = core
        self.service = service
        self.channel = channel
        self.engine = engine_pb2_grpc.EngineStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def open(self) -> Any:
        """A session that has been welcomed."""
        call = self.engine.Session()
        await call.write(HELLO)
        welcome = await guarded(call.read())
        assert welcome.welcome.protocol_version == 1
        return call

    async def until(self, condition: Callable[[], bool]) -> None:
        async def poll() -> None:
            while not condition():  # noqa: ASYNC110 - waits for another task, whatever it does
                await asyncio.sleep(0.002)

        await guarded(poll())


async def guarded(awaitable: Any) -> Any:
    """Only a hang makes this fail."""
    return await asyncio.wait_for(awaitable, GUARD_S)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a stream ends, its remaining messages read away (the end is falsy)."""

    async def read() -> None:
        while await call.read():
            pass

    try:
        await guarded(read())
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return await guarded(call.code()), await guarded(call.details())


@asynccontextmanager
async def engine_rig(folder: Path) -> AsyncIterator[Rig]:
    core, health = ScriptedCore(), Health(ENGINE_SERVICE)
    service = EngineService(core, health, INFO, draw_seed=lambda: 1, max_unacked_bytes=1 << 20)
    server = build_server(service, health)
    address = bind(server, f"unix:{folder}/grpc.sock")
    await server.start()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        yield Rig(core, service, channel)
    await server.stop(0)


def add(number: int, count: int = 3, **fields: Any) -> pb.SessionRequest:
    ids = np.arange(1, count + 1, dtype="<i4") % 1000
    return pb.SessionRequest(adds=[pb.AddRequest(number=number, prompt_ids=ids.tobytes(), **fields)])
