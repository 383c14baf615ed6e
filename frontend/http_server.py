"""HTTP without an opinion about what is served: routing, bounded bodies, server-sent events, errors, disconnects.

Owns the ASGI application. Every answer that isn't a handler's own is an OpenAI-shaped error, and every exception
becomes one here. Calls ASGI's `send` directly: at thousands of events a second, layers would cost more than the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from access.keys import NO_KEY, UNKNOWN_KEY, KeyFile
from frontend.api_errors import Headers, HttpError, http_headers, http_status, openai_body, unexpected, where
from frontend.request import ApiError, shutting_down
from frontend.spans import Spans
from telemetry.tracing import HEADER

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_TIMEOUT_S = 60.0
"""A body must have arrived by then."""
DRAIN_BODY_S = 1.0
"""From a drain on: what isn't all here is no call that a drain waits for."""
BUFFERED_BODIES = 8
"""Bodies of the largest size that may be on their way in at once."""
JSON = b"application/json"
DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


@dataclass(slots=True)
class BodyBudget:
    """Bytes of unread bodies held for all connections together, and how long they may take."""

    max_body_bytes: int
    held: int = 0
    hurried: bool = False
    _waits: set[asyncio.Timeout] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Around the wait for a whole body. Raises HttpError (408) when it takes too long, in a hurry ApiError
        (UNAVAILABLE)."""
        seconds = DRAIN_BODY_S if self.hurried else BODY_TIMEOUT_S
        try:
            async with asyncio.timeout(seconds) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if self.hurried:
                raise shutting_down() from None
            raise HttpError(408, f"the body wasn't complete within {BODY_TIMEOUT_S:g} s") from None

    def hurry(self) -> None:
        self.hurried = True
        until = asyncio.get_running_loop().time() + DRAIN_BODY_S
        for wait in self._waits:
            wait.reschedule(until)

    def take(self, size: int) -> None:
        if self.held + size > BUFFERED_BODIES * self.max_body_bytes:
            raise HttpError(503, "too many large bodies are on their way in; try again", [(b"retry-after", b"1")])
        self.held += size


class Exchange:
    """One HTTP request and its answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, budget: BodyBudget, keys: KeyFile | None = None
    ) -> None:
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.trusted = keys is None or keys.accepts(_authorization(scope))
        """Whether it brings a key that is accepted, or none is asked for."""
        self.streaming = False
        self._receive = receive
        self._send = send
        self._budget = budget

    async def body(self) -> bytes:
        """The whole body. Raises HttpError beyond the size limit, before it is all here, ApiError where a drain doesn't
        wait for it, and ClientGone."""
        if self.headers.get(b"content-encoding", b"identity") != b"identity":
            raise HttpError(415, "compressed bodies can't be read; send the JSON as it is")
        limit = self._budget.max_body_bytes
        if int(self._length() or 0) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        try:
            async with self._budget.in_time():
                more = True
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk: bytes = message.get("body", b"")
                    more = message.get("more_body", False)
                    if size + len(chunk) > limit:
                        raise _too_large(limit)
                    self._budget.take(len(chunk))
                    size += len(chunk)
                    chunks.append(chunk)
        finally:
            self._budget.held -= size
        return b"".join(chunks)

    async def unless_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, cancelled as soon as the client is gone. The body must have been read before.

        It runs in the caller's own task: one more for every call was a tenth of what a short call costs here.
        """
        task = asyncio.current_task()
        assert task is not None
        cancelled_before = task.cancelling()
        over = gone = False

        def leave(_: asyncio.Task[None]) -> None:
            nonlocal gone
            if not over:
                gone = True
                task.cancel()

        watch = asyncio.ensure_future(self._gone())
        watch.add_done_callback(leave)
        try:
            await work
        except asyncio.CancelledError:
            if gone and task.uncancel() <= cancelled_before:
                raise ClientGone from None
            raise
        finally:
            over = True
            watch.cancel()

    async def answer(
        self, body: bytes, status: int = 200, content_type: bytes = JSON, headers: Headers | None = None
    ) -> None:
        """The whole answer at once."""
        fixed = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": fixed + (headers or [])})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def start_events(self) -> None:
        """Begin a stream of server-sent events; errors become events of it from now on."""
        await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        self.streaming = True

    async def write(self, events: bytes) -> None:
        """Send whole events in one write; returns once the connection can take more."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def finish_events(self, last: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": last + DONE, "more_body": False})

    async def fail(self, error: ApiError | HttpError) -> None:
        """The error as this exchange's answer, or as the last event of its stream."""
        if self.streaming:
            await self.finish_events(b"data: " + openai_body(error) + b"\n\n")
        else:
            await self.answer(openai_body(error), http_status(error), headers=http_headers(error))

    def _length(self) -> bytes | None:
        value = self.headers.get(b"content-length")
        if value is not None and not (value.isdigit() and len(value) <= 18):
            raise HttpError(400, "content-length is no number of bytes")
        return value

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


Handler = Callable[[Exchange], Awaitable[None]]
Routes = Mapping[str, Mapping[str, Handler]]
"""Handlers by path and method. A path that ends in `*` stands for every longer one; `Exchange.path` tells which."""


class HttpServer:
    """The ASGI application over a table of routes."""

    def __init__(
        self,
        routes: Routes,
        max_body_bytes: int,
        keys: KeyFile | None = None,
        open_paths: Collection[str] = (),
        spans: Spans | None = None,
    ) -> None:
        """With `keys`, every request needs one of them, except on `open_paths`. POST requests get spans."""
        self._spans = spans or Spans(None)
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._exact = {path: methods for path, methods in routes.items() if not path.endswith("*")}
        self._prefixes = {path[:-1]: methods for path, methods in routes.items() if path.endswith("*")}
        self._budget = BodyBudget(max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        exchange = Exchange(scope, receive, send, self._budget, self._keys)
        try:
            self._admit(exchange)
            await self._traced(self._handler(exchange.path, scope["method"]), scope["method"], exchange)
        except ClientGone:
            return
        except (ApiError, HttpError) as error:
            await exchange.fail(error)
        except Exception as error:  # whatever it is, the client gets an answer and the server lives
            logger.error("%s %r failed: %s", scope["method"], exchange.path[:64], where(error))
            await exchange.fail(unexpected(error))

    def hurry(self) -> None:
        """A drain has begun: it doesn't wait for clients to send the rest of a body."""
        self._budget.hurry()

    async def _traced(self, handler: Handler, method: str, exchange: Exchange) -> None:
        """Run the handler, within a span where somebody wants one."""
        if method != "POST" or not self._spans.wanted:
            await handler(exchange)
            return
        parent = exchange.headers.get(HEADER.encode(), b"").decode("latin-1")
        attributes = {"http.request.method": method, "url.path": exchange.path}
        with self._spans.call(f"{method} {exchange.path}", parent, attributes):
            await handler(exchange)

    def _admit(self, exchange: Exchange) -> None:
        """Raise HttpError (401) for a request that lacks its key, whether or not there is anything at its path."""
        if self._keys is not None and not exchange.trusted and exchange.path not in self._open_paths:
            self._keys.refused += 1
            what = UNKNOWN_KEY if b"authorization" in exchange.headers else NO_KEY
            raise HttpError(401, f"{what} the header `Authorization: Bearer KEY`", [(b"www-authenticate", b"Bearer")])

    def _handler(self, path: str, method: str) -> Handler:
        methods = self._exact.get(path)
        if methods is None:
            methods = next((m for prefix, m in self._prefixes.items() if path.startswith(prefix)), None)
        if methods is None:
            raise HttpError(404, "there is nothing at this path; the API is under /v1, GET / is a page of all there is")
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(sorted(methods))
            raise HttpError(405, f"this path takes {allowed}, not this method", [(b"allow", allowed.encode())])
        return handler


def _authorization(scope: Scope) -> bytes | None:
    """The only such header; two of them are as good as none."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    return values[0] if len(values) == 1 else None


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than {limit} bytes")
