"""The frontend's two listeners under TLS, client certificates and keys: who gets in, and how the others are told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from greenlane.text.v1 import text_pb2, text_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from access import tls
from access.keys import NO_KEY, UNKNOWN_KEY, KeyFile
from access.policy import Access
from frontend import listeners
from frontend.health import HealthService
from frontend.http_server import HttpServer
from frontend.status_pages import OPEN_PATHS, WEB_FILES
from frontend.text_service import SERVICE, TextService
from tests.certificates import Authority, Issued, key_file
from tests.unit.scripted_answers import HANG_GUARD_S, MAX_BODY, Site

KEY = {"authorization": "Bearer the-key"}
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def access_of(served: Issued, *, clients: Path | None = None) -> Access:
    return Access(str(served.key), str(served.cert), None if clients is None else str(clients))


# ------------------------------ HTTP


@contextlib.asynccontextmanager
async def http(access: Access | None = None, keys: KeyFile | None = None) -> AsyncIterator[str]:
    """A whole site behind these guards; its base URL."""
    site = Site()
    app = HttpServer({**site.api.routes(), **site.pages.routes()}, MAX_BODY, keys, OPEN_PATHS)
    listener = listeners.bind("127.0.0.1", 0)
    server = listeners.HttpListener(app, listener, None if access is None else tls.http_context(access))
    server.start()
    try:
        yield listeners.http_address(listener, tls=access is not None)
    finally:
        await server.stop()


async def get(url: str, trust: Path, shown: Issued | None = None) -> httpx.Response:
    """GET over a connection of its own, as a client that trusts these authorities and shows this certificate."""
    context = ssl.create_default_context(cafile=trust)
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    async with httpx.AsyncClient(verify=context, timeout=HANG_GUARD_S, trust_env=False) as client:
        return await client.get(url)


async def test_http_asks_for_a_key(tmp_path: Path) -> None:
    """Red if any path but the open ones answers without a key, or the refusal isn't one that OpenAI clients read."""
    keys = KeyFile("--api-key-file", str(key_file(tmp_path, "the-key")))
    async with http(keys=keys) as url, httpx.AsyncClient(base_url=url, timeout=HANG_GUARD_S, trust_env=False) as client:
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("GET", "/metrics"),
            ("GET", "/version"),
            ("GET", "/status.json"),
            ("GET", "/nowhere"),
            ("GET", "/health/"),
            ("DELETE", "/v1/models"),
        ):
            for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "the-key"}):
                refused = await client.request(method, path, headers=headers)
                assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer"), path
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert refused.json()["error"]["message"].startswith(UNKNOWN_KEY if headers else NO_KEY)
                assert refused.json()["error"].keys() == {"message", "type", "param", "code"}
        twice = await client.get("/v1/models", headers=[("authorization", "Bearer the-key")] * 2)
        assert twice.status_code == 401
        assert (await client.get("/v1/models", headers=KEY)).status_code == 200
        assert (await client.get("/nowhere", headers=KEY)).status_code == 404
        assert (await client.get("/health")).status_code == 200
        assert keys.refused == 9 * 3 + 1, "a call that is let in counts, or one that isn't doesn't"


async def test_http_probes_need_no_key(tmp_path: Path) -> None:
    """Red if a probe is refused, or tells strangers more than the state."""
    keys = KeyFile("--api-key-file", str(key_file(tmp_path, "the-key")))
    async with http(keys=keys) as url, httpx.AsyncClient(base_url=url, timeout=HANG_GUARD_S, trust_env=False) as client:
        for path in ("/health", "/ping"):
            assert (await client.get(path)).json() == {"status": "serving"}
            assert {"status", "model", "device"} < (await client.get(path, headers=KEY)).json().keys()
        assert [(await client.get(path)).status_code for path in WEB_FILES] == [200] * len(WEB_FILES)


async def test_a_refused_body_is_not_read(tmp_path: Path) -> None:
    """Red if a stranger's body is taken in before the refusal."""
    keys = KeyFile("--api-key-file", str(key_file(tmp_path, "the-key")))
    async with http(keys=keys) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        async with asyncio.timeout(HANG_GUARD_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()


async def test_https_and_its_rotation(tmp_path: Path, authority: Authority) -> None:
    """Red if plain HTTP is served beside TLS, old TLS is spoken, or a new certificate needs a restart."""
    other = Authority(tmp_path, "other")
    async with http(access_of(authority.issue("server"))) as url:
        assert (await get(f"{url}/health", authority.ca)).status_code == 200
        with pytest.raises(httpx.TransportError):
            await get(url.replace("https", "http") + "/health", authority.ca)
        with pytest.raises(httpx.ConnectError):
            await get(f"{url}/health", other.ca)
        other.issue("server")
        assert (await get(f"{url}/health", other.ca)).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await get(f"{url}/health", authority.ca)
        (tmp_path / "server.key").write_bytes(b"half a key")
        assert (await get(f"{url}/health", other.ca)).status_code == 200


async def test_https_clients_show_certificates(tmp_path: Path, authority: Authority) -> None:
    """Red if a client without a certificate, or with a stranger's, gets in, or new authorities need a restart."""
    clients, strangers = Authority(tmp_path, "clients"), Authority(tmp_path, "strangers")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(clients.ca.read_bytes())
    guest, stranger = clients.issue("guest"), strangers.issue("stranger")
    async with http(access_of(authority.issue("server"), clients=trusted)) as url:
        assert (await get(f"{url}/health", authority.ca, guest)).status_code == 200
        for shown in (None, stranger):
            with pytest.raises(httpx.TransportError):
                await get(f"{url}/health", authority.ca, shown)
        trusted.write_bytes(strangers.ca.read_bytes())
        assert (await get(f"{url}/health", authority.ca, stranger)).status_code == 200
        with pytest.raises(httpx.TransportError):
            await get(f"{url}/health", authority.ca, guest)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_https_sessions_end_with_their_certificate(
    tmp_path: Path, authority: Authority, newest: ssl.TLSVersion
) -> None:
    """Red if a client whose certificate was taken away gets in by resuming the session of an earlier connection."""
    clients, others = Authority(tmp_path, "clients"), Authority(tmp_path, "others")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(clients.ca.read_bytes())
    guest = clients.issue("guest")
    context = ssl.create_default_context(cafile=authority.ca)
    context.maximum_version = newest
    context.load_cert_chain(guest.cert, guest.key)
    async with http(access_of(authority.issue("server"), clients=trusted)) as url:
        port = int(url.rpartition(":")[2])

        def ask(session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
            """What is said to a request on a connection of its own, and its session."""
            with socket.create_connection(("127.0.0.1", port), HANG_GUARD_S) as plain:
                try:
                    with context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secure:
                        secure.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                        return secure.recv(12), secure.session
                except OSError:
                    return b"", None

        said, session = await asyncio.to_thread(ask, None)
        assert said == (b"HTTP/1.1 200" if newest is ssl.TLSVersion.TLSv1_3 else b"")
        trusted.write_bytes(others.ca.read_bytes())
        assert (await asyncio.to_thread(ask, session))[0] == b""


# ------------------------------ text gRPC


@contextlib.asynccontextmanager
async def text_grpc(access: Access | None = None, keys: KeyFile | None = None) -> AsyncIterator[str]:
    """The text service behind these guards; its address."""
    health = HealthService(SERVICE)
    await health.tell(True)
    credentials = None if access is None else tls.server_credentials(access)
    service = TextService(Site().served, lambda: "id")
    server, address = listeners.grpc_server("127.0.0.1", 0, service, health, 1 << 20, tls=credentials, keys=keys)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def channel(address: str, trust: Path | None = None, shown: Issued | None = None) -> grpc.aio.Channel:
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    if trust is None:
        return grpc.aio.insecure_channel(address, options=options)
    pair = () if shown is None else (shown.key.read_bytes(), shown.cert.read_bytes())
    credentials = grpc.ssl_channel_credentials(trust.read_bytes(), *pair)
    return grpc.aio.secure_channel(address, credentials, options=options)


async def models(channel: grpc.aio.Channel, key: str | None = None) -> grpc.StatusCode:
    """The status of a ListModels call."""
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    try:
        stub = text_pb2_grpc.TextStub(channel)
        await stub.ListModels(text_pb2.ListModelsRequest(), metadata=metadata, timeout=HANG_GUARD_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_grpc_asks_for_a_key(tmp_path: Path) -> None:
    """Red if a method, of whatever kind or of none, is answered without a key, or health isn't."""
    keys = KeyFile("--api-key-file", str(key_file(tmp_path, "the-key", "second")))
    async with text_grpc(keys=keys) as address, channel(address) as open_channel:
        assert await models(open_channel) is UNAUTHENTICATED
        assert await models(open_channel, "the-ke") is UNAUTHENTICATED
        assert await models(open_channel, "the-key") is grpc.StatusCode.OK
        assert await models(open_channel, "second") is grpc.StatusCode.OK
        calls = [
            text_pb2_grpc.TextStub(open_channel).Generate(text_pb2.GenerateRequest(prompt="x")).read(),
            reflection_pb2_grpc.ServerReflectionStub(open_channel)
            .ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            .read(),
            open_channel.unary_unary("/greenlane.text.v1.Text/Nothing", bytes, bytes)(b""),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await asyncio.wait_for(call, HANG_GUARD_S)
            assert failed.value.code() is UNAUTHENTICATED
            assert str(failed.value.details()).startswith(NO_KEY)
        assert keys.refused == 2 + len(calls)
        health = health_pb2_grpc.HealthStub(open_channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        assert (await health.Watch(health_pb2.HealthCheckRequest()).read()).status == 1
        key_file(tmp_path, "third")
        assert await models(open_channel, "the-key") is UNAUTHENTICATED
        assert await models(open_channel, "third") is grpc.StatusCode.OK


async def test_grpc_tls_and_its_rotation(tmp_path: Path, authority: Authority) -> None:
    """Red if plain gRPC is served beside TLS, or a new certificate needs a restart."""
    other = Authority(tmp_path, "other")
    async with text_grpc(access_of(authority.issue("server"))) as address:
        for trust, status in ((authority.ca, grpc.StatusCode.OK), (None, UNAVAILABLE), (other.ca, UNAVAILABLE)):
            async with channel(address, trust) as opened:
                assert await models(opened) is status, trust
        other.issue("server")
        for trust, status in ((other.ca, grpc.StatusCode.OK), (authority.ca, UNAVAILABLE)):
            async with channel(address, trust) as opened:
                assert await models(opened) is status, trust


async def test_grpc_clients_show_certificates(tmp_path: Path, authority: Authority) -> None:
    """Red if a client without a certificate, or with a stranger's, gets in."""
    clients, strangers = Authority(tmp_path, "clients"), Authority(tmp_path, "strangers")
    guest, stranger = clients.issue("guest"), strangers.issue("stranger")
    async with text_grpc(access_of(authority.issue("server"), clients=clients.ca)) as address:
        for shown, status in ((guest, grpc.StatusCode.OK), (None, UNAVAILABLE), (stranger, UNAVAILABLE)):
            async with channel(address, authority.ca, shown) as opened:
                assert await models(opened) is status
