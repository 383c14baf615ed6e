"""The end of the HTTP listener: who waits for it is answered, and nobody who has stopped reading holds it up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket

import pytest

from frontend.listeners import HttpListener, bind
from tests.unit.scripted_answers import HANG_GUARD_S, Site, until, words


async def test_a_client_who_reads_no_further(caplog: pytest.LogCaptureFixture) -> None:
    """Red if a stop waits until uvicorn cancels the call, which it logs as a failure of ours."""
    site = Site()
    site.script.steps = words(*["x" * (1 << 20)] * 64)
    bound = bind("127.0.0.1", 0)
    listener = HttpListener(site.app, bound)
    listener.start()
    body = json.dumps({"prompt": "Emma", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: front\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(bound.getsockname()[:2]) as client:
        client.sendall(head + body)
        await until(lambda: len(site.script.answers) == 1)
        async with asyncio.timeout(HANG_GUARD_S):
            await listener.stop()
    (answer,) = site.script.answers
    assert answer.closed == 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_who_waits_to_be_taken_is_answered() -> None:
    """Red if connections that came before the end are reset, with their requests unread, or the end comes but once."""
    site = Site()
    bound = bind("127.0.0.1", 0)
    listener = HttpListener(site.app, bound)
    listener.start()
    await until(lambda: listener.started)
    site.served.drain()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: front\r\nContent-Length: 0\r\n\r\n"
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(socket.create_connection(bound.getsockname()[:2])) for _ in range(64)]
        for client in waiting:
            client.sendall(request)
            client.settimeout(HANG_GUARD_S)
        async with asyncio.timeout(HANG_GUARD_S):
            await listener.stop()
            await listener.stop()
        assert [client.recv(12) for client in waiting] == [b"HTTP/1.1 503"] * len(waiting)
