"""A listening socket's connections, taken one in a turn of the event loop.

Owns the accepting alone. uvloop's own server takes every connection that waits before anything else goes on, and reads
from all of them in the next turn: 256 that come together held up every open stream for some 20 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import select
import socket
import ssl
from collections.abc import Callable

RETRY_S = 1.0
"""Without room for another connection (descriptors, memory), until it is tried again."""
READ_TURNS = 4
"""Turns of the event loop in which a connection that was taken begins, is read, and its request begins."""
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
logger = logging.getLogger(__name__)


class Acceptor:
    """Takes connections from now on, until it is closed; open ones stay. The socket is its owner's to close, or
    `finish` does."""

    def __init__(
        self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None = None
    ) -> None:
        """`listener` listens and doesn't block; `protocol` makes a connection's."""
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[object]] = set()
        """Connections that shake hands, or begin."""
        self._listen()

    async def finish(self, at_most_s: float) -> None:
        """Take who waits, close the socket in the turn in which nobody does, and return when what they ask has begun.

        Who comes later is refused, not reset. After that time at all events, with the socket open or not: others may
        come as fast, and shake hands for ever.
        """
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                while self._retry is None and waiting.poll(0):  # noqa: ASYNC110 - nothing tells of an empty queue
                    await asyncio.sleep(0)
                self.close()
                self._listener.close()
                if self._opening:
                    await asyncio.wait(self._opening)
                for _ in range(READ_TURNS):
                    await asyncio.sleep(0)

    def close(self) -> None:
        """Take no more. Idempotent; call it before the socket is closed."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()

    async def wait_closed(self) -> None:
        """Returns when no connection is on its way any more."""
        for task in self._opening:
            task.cancel()
        if self._opening:
            await asyncio.wait(self._opening)

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Called once a turn while connections wait."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            logger.error("no connection can be taken: %s; trying again in %g s", error.strerror, RETRY_S)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(RETRY_S, self._listen)
            return
        connection.setblocking(False)
        opening = self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)
        task: asyncio.Task[object] = self._loop.create_task(opening)
        self._opening.add(task)
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[object]) -> None:
        """A client that fails to shake hands, or leaves meanwhile, is gone; nobody else hears of it."""
        self._opening.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a connection ended before it began: %s", type(error).__name__)
