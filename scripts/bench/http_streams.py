"""A client that streams completions over HTTP and knows when it read how much of each.

Owns the connections of load benches: one request each, events counted, tokens by the usage that every event tells.
Says nothing about where time went.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from array import array
from typing import Any, cast
from urllib.parse import urlsplit

COUNTED = b'"completion_tokens":'
ID = b'"id":"'
READ_FIELDS = 2


class Answer(asyncio.Protocol):
    """One streamed answer as it comes. One event may hold several tokens: each says how many there are so far."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set with the first event."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.label = ""
        self.events = 0
        """With text: not the usage's and [DONE]."""
        self.tokens = 0
        self.reads = array("d")
        """READ_FIELDS numbers for each read that brought tokens: how many the answer had then, and time.monotonic().
        Flat, so that garbage collections pass it by: looking through a million objects would hold up every stream."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's isn't a subclass
        self._transport.write(self._request)

    def leave(self) -> None:
        """Close the connection before the answer's end."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        # An event may be cut anywhere: count the first bytes of each that end in this piece.
        self.events += (self._tail[-5:] + data).count(b"data: ")
        tail = self._tail + data
        if self.events and not self.begun.done():
            self.begun.set_result(None)
        if not self.label and (at := tail.find(ID)) >= 0 and (end := tail.find(b'"', at + len(ID))) >= 0:
            self.label = tail[at + len(ID) : end].decode()
        counted = tail.rfind(COUNTED)
        end = tail.find(b",", counted)
        if counted >= 0 and end >= 0:
            tokens = int(tail[counted + len(COUNTED) : end])
            if tokens > self.tokens:
                self.tokens = tokens
                self.reads.extend((tokens, time.monotonic()))
        self._tail = tail[-1024:]

    def connection_lost(self, error: Exception | None) -> None:
        self.events -= 2
        self.done.set_result(None)

    def check(self, tokens: int) -> None:
        """Raises RuntimeError unless the answer ended as it should, with so many tokens."""
        if self.tokens != tokens or b"data: [DONE]" not in self._tail:
            raise RuntimeError(f"an answer of {tokens} tokens ended after {self.tokens}: {self._tail[-300:]!r}")


class HttpStreams:
    """Streams from one server, all on this event loop."""

    def __init__(self, url: str, model: str) -> None:
        address = urlsplit(url)
        self._host, self._port, self._netloc = str(address.hostname), address.port or 80, address.netloc
        self._model = model

    async def open(self, prompt: list[int], tokens: int, n: int = 1) -> Answer:
        """An answer of n sequences of so many tokens, asked for and on its way."""
        make = functools.partial(Answer, self._request(prompt, tokens, n))
        _, answer = await asyncio.get_running_loop().create_connection(make, self._host, self._port)
        return answer

    async def stream(self, prompt: list[int], tokens: int) -> Answer:
        """One whole answer of so many tokens. Raises RuntimeError for another one."""
        answer = await self.open(prompt, tokens)
        await answer.done
        answer.check(tokens)
        return answer

    def _request(self, prompt: list[int], tokens: int, n: int) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "n": n,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        data = json.dumps(body).encode()
        return (
            b"POST /v1/completions HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (self._netloc.encode(), len(data), data)
        )
