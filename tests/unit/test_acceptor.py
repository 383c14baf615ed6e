"""Connections are taken one in a turn; what a client or the system fails at costs nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from access import tls
from access.policy import Access
from frontend import acceptor
from frontend.acceptor import Acceptor
from frontend.listeners import bind
from tests.certificates import Authority
from tests.unit.loop_clock import Clock
from tests.unit.scripted_answers import HANG_GUARD_S, until

CONNECTIONS = 20
TURNS = 50


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0) as bound:
        yield bound


@contextlib.asynccontextmanager
async def accepting(*arguments: Any) -> AsyncIterator[Acceptor]:
    taker = Acceptor(*arguments)
    try:
        yield taker
    finally:
        taker.close()
        await taker.wait_closed()


def clients(stack: contextlib.ExitStack, listener: socket.socket, count: int) -> list[socket.socket]:
    """So many connections that the kernel holds ready."""
    address = listener.getsockname()[:2]
    return [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


class Noted(asyncio.Protocol):
    """Notes when it was made and whether it was connected."""

    def __init__(self, made: list[int], clock: Clock) -> None:
        made.append(clock.now)
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


async def test_connections_that_come_together_are_taken_one_in_a_turn(listener: socket.socket) -> None:
    """Red if several are taken in one turn, as by `create_server`: the event loop's other work waits for all of them
    then."""
    clock, made = Clock(), list[int]()
    protocols: list[Noted] = []

    def protocol() -> Noted:
        protocols.append(Noted(made, clock))
        return protocols[-1]

    with contextlib.ExitStack() as stack:
        clients(stack, listener, CONNECTIONS)
        async with accepting(listener, protocol):
            await until(lambda: len(protocols) == CONNECTIONS and all(each.transport for each in protocols))
        for each in protocols:
            assert each.transport is not None
            each.transport.close()
    clock.stop()
    assert len(set(made)) == CONNECTIONS, "two were made in one turn"


class Full(socket.socket):
    """Has no descriptor for another connection until there is `room`."""

    room = False
    tried = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.tried += 1
        if not self.room:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_without_room_it_is_tried_again_later(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Red if the loop spins on a connection that can't be taken, if nobody is told, or if it stays waiting for ever."""
    later: list[Any] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def held(delay: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        if delay != acceptor.RETRY_S:
            return call_later(delay, callback, *arguments)
        later.append(callback)
        return call_later(10 * HANG_GUARD_S, lambda: None)

    monkeypatch.setattr(loop, "call_later", held, raising=False)
    full = Full(fileno=listener.detach())
    made: list[int] = []
    clock = Clock()
    with full, contextlib.ExitStack() as stack:
        clients(stack, full, 1)
        async with accepting(full, lambda: Noted(made, clock)):
            await until(lambda: bool(later))
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert full.tried == 1
            assert "Too many open files" in caplog.text
            full.room = True
            later[0]()
            await until(lambda: len(made) == 1)
    clock.stop()


async def test_a_failed_handshake_is_the_client_s_own_affair(
    listener: socket.socket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red if a client that speaks no TLS, or leaves within the handshake, ends the accepting or fills the log; or if
    one that says nothing holds up others, or the end; or if who comes after the end waits for it."""
    authority = Authority(tmp_path)
    issued = authority.issue("localhost")
    context = tls.http_context(Access(str(issued.key), str(issued.cert), None))
    trust = ssl.create_default_context(cafile=issued.ca)
    made: list[int] = []
    clock = Clock()
    with contextlib.ExitStack() as stack, caplog.at_level(logging.DEBUG, acceptor.__name__):
        plain, gone, silent = clients(stack, listener, 3)
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        gone.close()
        async with asyncio.timeout(HANG_GUARD_S), accepting(listener, lambda: Noted(made, clock), context) as taker:
            await until(lambda: caplog.text.count("ended before it began") == 2)
            host, port = listener.getsockname()[:2]
            _, writer = await asyncio.open_connection(host, port, ssl=trust)
            writer.close()
            await taker.finish(0.01)
            assert listener.fileno() == -1
        silent.settimeout(HANG_GUARD_S)
        assert silent.recv(1) == b"", "the connection outlived its listener"
    clock.stop()
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
