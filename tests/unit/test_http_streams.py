"""HTTP streams on a real socket, and clients who leave or hardly come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from frontend.http_server import Exchange, HttpServer
from tests.unit.scripted_answers import HANG_GUARD_S, Site, gated, until, words


@pytest_asyncio.fixture
async def site() -> Site:
    return Site()


@pytest_asyncio.fixture
async def url(site: Site) -> AsyncIterator[str]:
    async with site.listening() as address:
        yield address


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=HANG_GUARD_S, trust_env=False) as client:
        yield client


async def test_events_arrive_one_by_one(client: httpx.AsyncClient, site: Site) -> None:
    """Red if headers come before acceptance, or an event waits for the next one."""
    site.script.gated_acceptance = True
    site.script.steps = gated(words("a", "b"))
    request = client.build_request("POST", "/v1/completions", json={"prompt": "x", "stream": True})
    sending = asyncio.ensure_future(client.send(request, stream=True))
    await until(lambda: len(site.script.answers) == 1)
    await asyncio.sleep(0.05)
    assert not sending.done()
    answer = site.script.answers[0]
    answer.release()
    response = await sending
    lines = response.aiter_lines()
    for text in ("a", "b"):
        answer.release()
        assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == text
        assert await anext(lines) == ""
    assert await anext(lines) == "data: [DONE]"
    await response.aclose()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_client_gone(url: str, site: Site, stream: bool, path: str) -> None:
    """Red if a client that went away leaves its request running in the engine core, streamed or not."""
    site.script.steps = [*words("a", "b")[:1], None]
    body = {"prompt": ["x", "y"], "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    content = json.dumps(body).encode()
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(content)) + content)
    await writer.drain()
    if stream:
        await reader.readuntil(b'"a"')
    else:
        await until(lambda: site.metrics.output_tokens >= 1)
    assert site.metrics.open_requests >= 1
    writer.close()
    await until(lambda: site.metrics.open_requests == 0)
    assert [answer.closed for answer in site.script.answers] == [1] * len(site.script.answers)
    assert site.metrics._outcomes["cancelled"] == len(site.script.answers)


async def test_client_gone_with_a_request_behind(url: str, site: Site) -> None:
    """Red if a streamed request goes on without its client because another one waited behind it on the connection."""
    site.script.steps = gated(words(*"abcdefghijklmnopqrstuvwxyz" * 8))
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    content = b'{"prompt": "x", "stream": true}'
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content
    writer.write(request * 2)
    await until(lambda: bool(site.script.answers))
    site.script.answers[0].release()
    await reader.readuntil(b'"a"')
    writer.transport.abort()
    while site.metrics.open_requests:
        site.script.answers[0].release()
        await asyncio.sleep(0.001)
    assert site.metrics._outcomes["cancelled"] == len(site.script.answers) == 1


async def test_client_gone_before_acceptance(url: str, site: Site) -> None:
    """Red if a request still in the queue outlives its client."""
    site.script.gated_acceptance = True
    async with httpx.AsyncClient(trust_env=False) as client:
        asking = asyncio.ensure_future(client.post(f"{url}/v1/completions", json={"prompt": "x"}))
        await until(lambda: site.metrics.open_requests == 1)
        asking.cancel()
    await until(lambda: site.metrics.open_requests == 0)
    assert site.script.answers[0].closed == 1


async def test_client_gone_in_the_body(url: str, site: Site) -> None:
    """Red if half a body is taken for a request, or keeps its bytes in the budget."""
    _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n" + b" " * 1000)
    await until(lambda: site.app._budget.held == 1000)
    writer.close()
    await until(lambda: site.app._budget.held == 0)
    assert site.script.answers == []


async def test_body_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a client may take for ever over its body."""
    monkeypatch.setattr("frontend.http_server.BODY_TIMEOUT_S", 0.01)
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: object) -> None:
        sent.append(dict(message))  # type: ignore[call-overload]

    async def read(exchange: Exchange) -> None:
        await exchange.body()

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    await HttpServer({"/": {"POST": read}}, 100)(scope, receive, send)
    assert sent[0]["status"] == 408


async def test_a_drain_does_not_wait_for_the_rest_of_a_body(
    url: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red if a client that has sent half a body holds up a drain, or hears nothing at its end."""
    monkeypatch.setattr("frontend.http_server.DRAIN_BODY_S", 0.01)
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n" + b" " * 1000)
    await until(lambda: site.app._budget.held == 1000)
    site.app.hurry()
    site.served.drain()
    await site.served.idle()
    said = await reader.read()
    assert said.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: " in said
    writer.close()
