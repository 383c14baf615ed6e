"""Connections that never finish a request's head."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from frontend import listeners
from frontend.listeners import HttpListener


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow:"])
async def test_a_head_that_never_ends_closes_the_connection(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if silent or half-spoken connections are held for ever: a few thousand of them use up the descriptors."""
    monkeypatch.setattr(listeners, "HEAD_S", 0.05)
    bound = socket.create_server(("127.0.0.1", 0))
    server = HttpListener(nothing, bound)  # type: ignore[arg-type]
    server.start()
    try:
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(said)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
    finally:
        await server.stop()
