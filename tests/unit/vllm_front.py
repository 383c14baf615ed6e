"""VllmEngine on a real server, over a scripted model or over an engine core with the fake device; and a client."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from frontend import listeners
from frontend.config import Place
from frontend.engine_client import EngineClient
from frontend.engine_group import EngineGroup
from frontend.generate import generate
from frontend.health import HealthService
from frontend.metrics import Metrics
from frontend.model_files import ModelFiles
from frontend.peers import Peers
from frontend.serving import Served
from frontend.tokenizer import Tokenizer
from frontend.vllm_service import SERVICE, VllmService
from tests.unit.scripted_answers import FIXTURE, HANG_GUARD_S, Site


class VllmFront:
    """A served model, and a channel to its VllmEngine."""

    def __init__(self, served: Served, service: VllmService, address: str, channel: grpc.aio.Channel) -> None:
        self.served = served
        self.service = service
        self.address = address
        self.channel = channel
        self.engine: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    def generate(self, stream: bool = True, timeout: float | None = HANG_GUARD_S, **fields: Any) -> Any:
        """A call; fields that the request doesn't have are its sampling parameters'."""
        own = {name: fields.pop(name) for name in list(fields) if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name}
        own = {"request_id": "some", **own}
        request = pb.GenerateRequest(**own, stream=stream, sampling_params=pb.SamplingParams(**fields))
        return self.engine.Generate(request, timeout=timeout)

    async def answer(self, **fields: Any) -> tuple[list[Any], list[Any]]:
        """The chunks and the completions of a call."""
        messages = [message async for message in self.generate(**fields)]
        chunks = [each.chunk for each in messages if each.HasField("chunk")]
        return chunks, [each.complete for each in messages if each.HasField("complete")]

    async def abort(self, *request_ids: str) -> None:
        await self.engine.Abort(pb.AbortRequest(request_ids=request_ids))


@asynccontextmanager
async def fronting(served: Served, place: Place | None = None) -> AsyncIterator[VllmFront]:
    """The model's VllmEngine on a free port, of one frontend among those of `place`."""
    peers = Peers(place or Place())
    service = VllmService(served, ModelFiles.load(FIXTURE), peers, time.monotonic)
    server, address = listeners.vllm_server("127.0.0.1", 0, service, HealthService(SERVICE), 16 << 20)
    await peers.start()
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            yield VllmFront(served, service, address, channel)
    finally:
        await server.stop(None)
        await peers.stop()


@asynccontextmanager
async def connected(engine_address: str) -> AsyncIterator[Served]:
    """The model of an engine core that runs, served as a frontend process serves it."""
    client, tokenizer = EngineGroup([EngineClient(engine_address)]), Tokenizer.load(FIXTURE)

    async def lost() -> None:
        return None

    await client.start()
    await client.serving()
    try:
        yield Served(
            names=("tiny",),
            tokenizer=tokenizer,
            template=None,
            engine=client,
            start=functools.partial(generate, client, tokenizer),
            on_lost=lost,
            metrics=Metrics(),
            clock=time.monotonic,
        )
    finally:
        await client.close()


class Scripted(VllmFront):
    """A front over a script."""

    def __init__(self, site: Site, front: VllmFront) -> None:
        super().__init__(site.served, front.service, front.address, front.channel)
        self.site = site


@asynccontextmanager
async def scripted() -> AsyncIterator[Scripted]:
    """A script behind a VllmEngine."""
    site = Site()
    async with fronting(site.served) as front:
        yield Scripted(site, front)


async def failed(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call ends with."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call went well")
