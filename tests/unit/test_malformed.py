"""Bytes that are no message, sent to every method of every gRPC server: the client's fault, and nothing is logged."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from greenlane.engine.v1 import engine_pb2
from greenlane.text.v1 import text_pb2
from grpc_health.v1 import health_pb2
from smg_grpc_proto import vllm_engine_pb2

from engine_core.health import Health
from engine_core.server import bind, build_server
from engine_core.service import ENGINE_SERVICE, EngineService
from tests.unit.scripted_answers import Site
from tests.unit.served_engine import INFO, ScriptedCore, guarded
from tests.unit.text_front import text_front
from tests.unit.vllm_front import fronting

NO_MESSAGE = b"\xff\xff\xff"


@asynccontextmanager
async def engine_channel(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    health = Health(ENGINE_SERVICE)
    server = build_server(EngineService(ScriptedCore(), health, INFO, draw_seed=lambda: 1), health)
    address = bind(server, f"unix:{folder}/grpc.sock")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel
    await server.stop(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="greenlane-test-") as folder:
        yield Path(folder)


async def channels(stack: AsyncExitStack, folder: Path) -> list[tuple[ServiceDescriptor, grpc.aio.Channel]]:
    """Every service of ours, and where it is."""
    text = (await stack.enter_async_context(text_front(Site()))).channel
    vllm = (await stack.enter_async_context(fronting(Site().served))).channel
    engine = await stack.enter_async_context(engine_channel(folder))
    health = health_pb2.DESCRIPTOR.services_by_name["Health"]
    return [
        (text_pb2.DESCRIPTOR.services_by_name["Text"], text),
        (vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"], vllm),
        (engine_pb2.DESCRIPTOR.services_by_name["Engine"], engine),
        *((health, channel) for channel in (text, vllm, engine)),
    ]


async def end_of(channel: grpc.aio.Channel, method: str, *, streams: bool, data: bytes) -> grpc.StatusCode:
    """How a call with these bytes ends."""
    open_call: Any = channel.unary_stream if streams else channel.unary_unary
    call = open_call(method)(data)
    try:
        if streams:
            await guarded(call.read())
        else:
            await guarded(call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


async def test_malformed_messages(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red if garbage ends a call as a fault of the server (UNKNOWN), or writes a traceback into the log."""
    ends: dict[str, grpc.StatusCode] = {}
    async with AsyncExitStack() as stack:
        for service, channel in await channels(stack, folder):
            for method in service.methods:
                if method.client_streaming:
                    continue
                path = f"/{service.full_name}/{method.name}"
                ends[path] = await end_of(channel, path, streams=method.server_streaming, data=NO_MESSAGE)
    assert set(ends.values()) == {grpc.StatusCode.INVALID_ARGUMENT}, ends
    assert len(ends) > 20
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_others_are_read(folder: Path) -> None:
    """Red if a call is refused because one before it was malformed."""
    async with AsyncExitStack() as stack:
        for service, channel in await channels(stack, folder):
            if service.name == "Health":
                path = f"/{service.full_name}/Check"
                for data, end in ((NO_MESSAGE, grpc.StatusCode.INVALID_ARGUMENT), (b"", grpc.StatusCode.OK)):
                    assert await end_of(channel, path, streams=False, data=data) is end
