"""The frontend's listening servers: HTTP, text gRPC and VllmEngine, bound before anybody is told their addresses.

Owns sockets, ports and the servers' own settings. Knows nothing of models and requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from typing import Any

import grpc
import grpc.aio
import httptools
import uvicorn
from greenlane.text.v1 import text_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2_grpc
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from access.interceptor import interceptors
from access.keys import KeyFile
from frontend.acceptor import Acceptor
from frontend.api_errors import HttpError, openai_body
from frontend.config import ConfigError
from frontend.health import HealthService
from frontend.http_server import HttpServer
from frontend.spans import SpanInterceptor, Spans
from frontend.text_service import SERVICE, TextService
from frontend.vllm_service import SERVICE as VLLM_SERVICE
from frontend.vllm_service import VllmService

BACKLOG = 2048
KEEP_ALIVE_S = 30
HEAD_S = 30.0
"""For the request line and headers to arrive, from the connection or from the request's first byte."""
MAX_HEAD_BYTES = 64 << 10
MAX_UNWANTED_BYTES = 32 << 20
TLS_HANDSHAKE = b"\x16\x03"
"""What a TLS connection begins with, and no HTTP."""
STOP_S = 1
"""How long connections may take to close once nothing is served any more; then they are cut."""
CUT_S = 1
"""For the calls on those to notice."""
GATEWAY_PINGS = (
    # A gateway pings every 30 s, also through a long silent prefill; by default that is too often and costs the
    # connection, with all calls on it.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening TCP socket; `shared`: with other frontends of this server, each of which gets some connections.

    Raises ConfigError naming the flag when the address can't be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--port {port} on --host {host} can't be listened on ({error.strerror}); choose another one, or 0 for any"
        ) from error
    listener.setblocking(False)
    return listener


def http_address(listener: socket.socket, *, tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{_bracketed(host)}:{port}"


class _Offered(Exception):
    """A request offers to go on in another protocol; its head took that many bytes of what was being read."""

    def __init__(self, head_bytes: int) -> None:
        self.head_bytes = head_bytes


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's connection, with bounds on what comes before a body and after its refusal, and refusals as JSON.

    Offers to go on in another protocol are passed over: curl and Java's client make one with every plain request, and
    uvicorn would lose the body and the connection over it.
    """

    _in_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _declared = False
    _unwanted = 0
    """Bytes of a body that came after its refusal."""
    _head_bytes = 0
    """Received since the request began, as long as its headers aren't complete; the piece it began in not counted."""
    _answering: RequestResponseCycle | None = None
    """The request being answered; uvicorn knows the latest that came, which may still wait behind it."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit_head()

    def _limit_head(self) -> None:
        """A request's head is complete soon, or the connection is closed: half-open ones may not pile up."""
        self._in_head = True
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_S, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._in_head and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._answering is None and data.startswith(TLS_HANDSHAKE):
            self.send_400_response("this port speaks HTTP without TLS: use http://")
            return
        self._head_bytes += len(data)
        left = memoryview(data)
        while left and not self.transport.is_closing():
            try:
                super().data_received(left)  # type: ignore[arg-type]  # the parser takes any buffer
                left = left[:0]
            except _Offered as offered:
                left = left[offered.head_bytes :]
                self._read_again()
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes")

    def _unsupported_upgrade_warning(self) -> None:
        """Called where the parser stops behind the head of a request with an offer."""
        stopped = sys.exception()
        assert isinstance(stopped, httptools.HttpParserUpgrade)
        raise _Offered(stopped.args[0])

    def _read_again(self) -> None:
        """Read a head again as if it hadn't made its offer; its body, if it has one, is still to come."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.send_400_response("this is no proxy: CONNECT is not served")
            return
        headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        head = b"\r\n".join([method + b" " + self.url + b" HTTP/" + version, *headers, b"", b""])
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own parser
        self.parser.feed_data(head)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._limit_head()
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head, self._unwanted = False, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._declared = any(name == b"content-length" for name, _ in self.headers)
        self.server_state.default_headers = _date(int(time.time()))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A refused client may send its body to the end, to read the answer then, unless that has no end."""
        super().on_body(body)
        if self.cycle.response_complete and not self._declared:
            self._unwanted += len(body)
            if self._unwanted > MAX_UNWANTED_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it while it handles its parser's error, with a sentence that names no cause."""
        error = sys.exception()
        if isinstance(error, httptools.HttpParserError):
            msg = f"this is no HTTP that can be read: {error}"
        body = openai_body(HttpError(400, msg))
        head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


@functools.lru_cache(maxsize=1)
def _date(second: int) -> list[tuple[bytes, bytes]]:
    """The Date header of answers begun in that second since the epoch."""
    return [(b"date", formatdate(second, usegmt=True).encode())]


class HttpListener(uvicorn.Server):
    """uvicorn on a bound socket. Signals belong to the process, not to one of its servers."""

    def __init__(self, app: HttpServer, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            loop="none",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S + CUT_S,
        )
        config.load()
        config.ssl = tls
        super().__init__(config)
        self._listener = listener
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._acceptor: Acceptor | None = None
        """Once it serves."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start without uvicorn's own listening; `shutdown` closes what stands in `servers`, then the sockets."""
        await super().startup(sockets=[])
        self._acceptor = Acceptor(self._listener, self._protocol, self.config.ssl)
        self.servers.append(self._acceptor)  # type: ignore[arg-type]  # a server's close and wait_closed are all it needs

    def _protocol(self) -> HttpProtocol:
        return HttpProtocol(self.config, self.server_state, self.lifespan.state)

    async def main_loop(self) -> None:
        """Sleep until `stop`, where uvicorn wakes up ten times a second, for the Date header: requests see to it."""
        await self._stopping.wait()

    def start(self) -> asyncio.Task[None]:
        """Serve from now on; the task ends when the server has stopped."""
        self._running = asyncio.create_task(self.serve(sockets=[self._listener]), name="http")
        return self._running

    async def stop(self) -> None:
        """Close the listener and the connections, at once where nothing is being answered.

        Requests whose connections wait to be taken get their answer first. A client who reads no further is cut off:
        what is still to be written for it would wait for ever.
        """
        if self._acceptor is not None and self._running is not None and not self._running.done():
            await self._acceptor.finish(STOP_S)
        self.should_exit = True
        self._stopping.set()
        if self._running is None:
            return
        _, late = await asyncio.wait((self._running,), timeout=STOP_S)
        for connection in list(self.server_state.connections) if late else ():
            connection.transport.abort()
        await asyncio.wait((self._running,))


def grpc_server(
    host: str,
    port: int,
    text: TextService,
    health: HealthService,
    max_message_bytes: int,
    *,
    tls: grpc.ServerCredentials | None = None,
    keys: KeyFile | None = None,
    shared: bool = False,
    spans: Spans | None = None,
) -> tuple[grpc.aio.Server, str]:
    """The text gRPC server, bound but not started, and its address. Raises ConfigError when the port can't be had.

    With `keys`, every call but health's needs one of them; `shared` as for `bind`.
    """
    server = _new_server(max_message_bytes, keys=keys, shared=shared, spans=spans)
    text_pb2_grpc.add_TextServicer_to_server(text, server)
    _add_common(server, SERVICE, health)
    return server, _bind_grpc(server, "--grpc-port", "--host", host, port, tls)


def vllm_server(
    host: str,
    port: int,
    vllm: VllmService,
    health: HealthService,
    max_message_bytes: int,
    *,
    shared: bool = False,
    spans: Spans | None = None,
) -> tuple[grpc.aio.Server, str]:
    """The VllmEngine server, bound but not started, and its address. Raises ConfigError when the port can't be had.

    Neither TLS nor keys: its clients know neither.
    """
    server = _new_server(max_message_bytes, GATEWAY_PINGS, shared=shared, spans=spans)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(vllm, server)
    _add_common(server, VLLM_SERVICE, health)
    return server, _bind_grpc(server, "--vllm-grpc-port", "--vllm-grpc-host", host, port)


def _new_server(
    max_message_bytes: int,
    options: Sequence[tuple[str, int]] = (),
    *,
    keys: KeyFile | None = None,
    shared: bool,
    spans: Spans | None,
) -> grpc.aio.Server:
    return grpc.aio.server(
        interceptors=(*interceptors(keys), *(() if spans is None else (SpanInterceptor(spans),))),
        options=[
            ("grpc.so_reuseport", int(shared)),  # gRPC's own default would share a port with any other server
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            *options,
        ],
    )


def _add_common(server: grpc.aio.Server, service: str, health: HealthService) -> None:
    """What every gRPC server has: health and reflection."""
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((service, HEALTH_SERVICE, reflection.SERVICE_NAME), server)


def _bind_grpc(
    server: grpc.aio.Server,
    port_flag: str,
    host_flag: str,
    host: str,
    port: int,
    tls: grpc.ServerCredentials | None = None,
) -> str:
    """The address that the server got. Raises ConfigError naming the flags."""
    try:
        wanted = f"{_bracketed(host)}:{port}"
        bound: Any = server.add_insecure_port(wanted) if tls is None else server.add_secure_port(wanted, tls)
    except RuntimeError as error:
        raise ConfigError(
            f"{port_flag} {port} on {host_flag} {host} can't be listened on; choose another one, or 0 for any"
        ) from error
    return f"{_bracketed(host)}:{bound}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
