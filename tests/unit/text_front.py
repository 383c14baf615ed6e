"""The text gRPC service over a script on a real server, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from greenlane.text.v1 import text_pb2 as pb
from greenlane.text.v1 import text_pb2_grpc

from frontend import listeners
from frontend.health import HealthService
from frontend.text_service import SERVICE, TextService
from tests.unit.scripted_answers import HANG_GUARD_S, Site


class Front:
    """A site served over gRPC, and a channel to it."""

    def __init__(self, site: Site, health: HealthService, address: str, channel: grpc.aio.Channel) -> None:
        self.site = site
        self.health = health
        self.address = address
        self.channel = channel
        self.text = text_pb2_grpc.TextStub(channel)

    def generate(self, timeout: float = HANG_GUARD_S, **fields: Any) -> Any:
        return self.text.Generate(pb.GenerateRequest(**fields), timeout=timeout)


@asynccontextmanager
async def text_front(site: Site) -> AsyncIterator[Front]:
    """The site's text gRPC on a free port."""
    health = HealthService(SERVICE)
    server, address = listeners.grpc_server(
        "127.0.0.1", 0, TextService(site.served, lambda: "made-id"), health, 1 << 20
    )
    await server.start()
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield Front(site, health, address, channel)
    await server.stop(None)


async def failed(call: Any, texts: list[str] | None = None) -> grpc.aio.AioRpcError:
    """The error that a call ends with; `texts` gets what comes before it."""
    try:
        async for message in call:
            if texts is not None:
                texts += [delta.text for delta in message.deltas]
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call went well")
