"""Connections that never finish a request's head, and what stands in an answer's."""

from __future__ import annotations

import asyncio
import socket
import time
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


async def test_an_answer_says_when_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if answers have no Date, two of them, or that of an earlier request."""
    seconds = iter([0.5, 86400.9])
    monkeypatch.setattr(time, "time", lambda: next(seconds))
    bound = socket.create_server(("127.0.0.1", 0))
    server = HttpListener(nothing, bound)  # type: ignore[arg-type]
    server.start()
    try:
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        for day in (1, 2):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(60):
                head = await reader.readuntil(b"\r\n\r\n")
            dates = [line for line in head.splitlines() if line.lower().startswith(b"date:")]
            assert [date.partition(b", ")[2] for date in dates] == [b"0%d Jan 1970 00:00:00 GMT" % day]
        writer.close()
    finally:
        await server.stop()
