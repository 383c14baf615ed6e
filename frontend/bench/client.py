"""An HTTP client for load: one request a connection, its answer by lines, each with the time at which it came.

Owns the connection and HTTP/1.1 (`httptools` parses it). Knows no JSON and no model. A library's response reader would
take longer per event than a server's work for it; the time of a line is that of the read that brought its end.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from access.keys import KeyFile
from access.policy import AccessError, check_in_the_clear

CONNECT_S = 30.0
UNAUTHORIZED = 401
MAX_ERROR_BYTES = 2000
OnLine = Callable[[float, bytes], None]


class BenchError(Exception):
    """Nothing can be measured; the message says why, the status is the command's: 1 where a server is to blame."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Target:
    """Where the server is, and what it takes to get in."""

    host: str
    port: int
    prefix: str = ""
    """Of every path."""
    tls: ssl.SSLContext | None = None
    authorization: str | None = None

    @classmethod
    def of(cls, url: str, ca_certs: str | None = None, api_key_file: str | None = None) -> Target:
        """`url` with or without its /v1. Raises BenchError (2) for what can't be used."""
        try:
            parts = urlsplit(url)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            if not parts.hostname or parts.query or parts.fragment or parts.username:
                raise ValueError
        except (ValueError, KeyError):
            raise BenchError(f"--url {url}: say http://HOST:PORT or https://HOST:PORT", 2) from None
        try:
            tls = ssl.create_default_context(cafile=ca_certs) if parts.scheme == "https" else None
            if api_key_file is not None and tls is None:
                host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
                check_in_the_clear("--api-key-file", f"{host}:{port}", "use https")
            bearer = None if api_key_file is None else KeyFile("--api-key-file", api_key_file).bearer()
        except AccessError as error:
            raise BenchError(str(error), 2) from error
        except OSError as error:  # ssl.SSLError is one
            raise BenchError(f"--ssl-ca-certs {ca_certs} can't be read ({error.strerror})", 2) from error
        return cls(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"), tls, bearer)

    async def fetch(self, method: str, path: str, body: bytes, on_line: OnLine) -> float:
        """One request; every whole line of a 200 answer goes to `on_line`. Returns when it was sent, in seconds of
        `time.perf_counter`, once the answer is complete; cancelled, it closes the connection. Raises BenchError."""
        loop = asyncio.get_running_loop()
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if self.authorization is not None:
            head += f"Authorization: {self.authorization}\r\n"
        what = f"{method} {path}"
        try:
            async with asyncio.timeout(CONNECT_S):
                transport, answer = await loop.create_connection(
                    lambda: _Answer(what, on_line), self.host, self.port, ssl=self.tls
                )
        except OSError as error:  # TimeoutError is one
            reason = error.strerror or str(error) or "no answer"
            if isinstance(error, ssl.SSLCertVerificationError):
                reason += "; --ssl-ca-certs FILE names who signed its certificate, which must name the host"
            raise BenchError(f"{self.host}:{self.port} can't be reached ({reason})") from error
        try:
            sent = time.perf_counter()
            transport.write(f"{head}\r\n".encode() + body)
            await answer.done
            return sent
        finally:
            transport.abort()


class _Answer(asyncio.Protocol):
    """One answer as it comes; `done` ends with it."""

    def __init__(self, what: str, on_line: OnLine) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._what = what
        self._on_line = on_line
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._status = 0
        self._bounded = False
        """Whether the answer says where it ends; otherwise it ends with the connection."""
        self._rest = b""

    # ------------------------------ asyncio

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(BenchError(f"{self._what}: the answer is no HTTP ({error})"))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._status and not self._bounded:
            self.on_message_complete()
        self._fail(BenchError(f"{self._what}: the connection was closed before the answer's end"))

    # ------------------------------ httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._bounded |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._rest += body
        if self._status != 200:
            self._rest = self._rest[:MAX_ERROR_BYTES]
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._on_line(self._now, line)

    def on_message_complete(self) -> None:
        if self._status != 200:
            said = self._rest.decode(errors="replace").strip()
            remedy = "; --api-key-file FILE sends the first key of a file" if self._status == UNAUTHORIZED else ""
            self._fail(BenchError(f"{self._what}: HTTP {self._status}: {said}{remedy}"))
        elif not self.done.done():
            if self._rest:
                self._on_line(self._now, self._rest)
            self.done.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)
