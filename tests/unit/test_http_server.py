"""HTTP itself on a real socket: bounds, errors, disconnects, and the openai package as a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio
from greenlane.engine.v1 import engine_pb2 as pb

from frontend.engine_client import ClientState
from frontend.request import ApiError, Code
from frontend.serving import Health
from frontend.status_pages import WEB_FILES
from tests.unit.scripted_answers import HANG_GUARD_S, MAX_BODY, Site, until, words

CANARY = "the-canary-sang-at-dawn"


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


def shaped(response: httpx.Response) -> dict[str, object]:
    """The error of a response, checked to have OpenAI's shape."""
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, object] = body["error"]
    return error


# ------------------------------ errors


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("PUT", "/health", 405),
    ],
)
async def test_paths_and_methods(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    """Red if an unknown path or method gets anything but an OpenAI-shaped error."""
    response = await client.request(method, path)
    assert response.status_code == status
    shaped(response)
    if status == 405:
        assert response.headers["allow"] in ("GET", "POST")


async def test_malformed_bodies(client: httpx.AsyncClient, site: Site) -> None:
    """Red if a body that can't be read gets another status, or harms the connection."""
    for body in (b"", b"{", b'{"prompt": "\xff"}', b"[1]", b'{"prompt": NaN}'):
        response = await client.post("/v1/completions", content=body)
        assert response.status_code == 400
        assert shaped(response)["type"] == "invalid_request_error"
    packed = await client.post("/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
    assert packed.status_code == 415
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert len(site.script.answers) == 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a" * 900_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 900_000}]}),
    ],
)
async def test_a_text_that_cant_fit(
    client: httpx.AsyncClient, site: Site, path: str, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red if a text longer than any prompt that fits is tokenized before it is refused: 30 MB take a minute."""
    monkeypatch.setattr(site.tokenizer, "encode_inline", lambda *_: [1])
    response = await client.post(path, json=fields)
    assert response.status_code == 400
    assert "the context of 2048 tokens holds" in str(shaped(response)["message"])
    assert site.script.answers == []


@pytest.mark.parametrize("declared", [True, False])
async def test_huge_body(client: httpx.AsyncClient, site: Site, declared: bool) -> None:
    """Red if a body of 100 MB is read into memory before it is refused, or the next request suffers."""
    size = (100 if declared else 20) << 20

    async def upload() -> AsyncIterator[bytes]:
        for _ in range(size >> 20):
            yield b" " * (1 << 20)

    headers = {"content-length": str(size)} if declared else {}
    response = await client.post("/v1/completions", content=upload(), headers=headers)
    assert response.status_code == 413
    assert str(MAX_BODY) in str(shaped(response)["message"])
    assert site.app._budget.held == 0
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_endless_body(url: str, client: httpx.AsyncClient) -> None:
    """Red if a client may go on sending for ever what was refused long ago."""
    _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    with pytest.raises(ConnectionError):
        await send_for_ever(writer)
    writer.close()
    assert (await client.get("/health")).status_code == 200


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        await writer.drain()


async def test_body_of_the_largest_size(client: httpx.AsyncClient) -> None:
    """Red if the bound is off by one."""
    body = json.dumps({"prompt": "x", "user": ""})
    room = MAX_BODY - len(body)
    for extra, status in ((room, 200), (room + 1, 413)):
        padded = json.dumps({"prompt": "x", "user": "u" * extra})
        assert (await client.post("/v1/completions", content=padded)).status_code == status


async def test_unexpected_error(client: httpx.AsyncClient, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Red if an error that nobody foresaw shows its text, to the client or in the log, or kills the server."""

    site.script.surprise = ValueError(CANARY)
    with caplog.at_level(logging.DEBUG):
        response = await client.post("/v1/completions", json={"prompt": CANARY})
    assert response.status_code == 500
    assert "ValueError" in str(shaped(response)["message"])
    assert CANARY not in response.text
    assert CANARY not in caplog.text
    assert "scripted" not in response.text
    site.script.surprise = None
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"nonsense\r\n\r\n", "this is no HTTP that can be read: Invalid method encountered"),
        (b"GET / HTTP/9.9\r\n\r\n", "this is no HTTP that can be read: Invalid HTTP version"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", "this is no HTTP that can be read: Invalid char"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "this port speaks HTTP without TLS: use http://"),
        (b"", "the request line and headers are larger than"),
    ],
)
async def test_malformed_http(url: str, client: httpx.AsyncClient, head: bytes, why: str) -> None:
    """Red if what is no HTTP, or a header without an end, gets anything but a shaped refusal that tells why, or takes
    memory."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    if head:
        writer.write(head)
    else:
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"y" * (1 << 16))
                await writer.drain()
    with contextlib.suppress(ConnectionError):
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 400 ")
        error = json.loads(said.split(b"\r\n\r\n", 1)[1])["error"]
        assert error["type"] == "invalid_request_error"
        assert why in error["message"]
    writer.close()
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("piece", [1, 1 << 20])
async def test_an_offer_of_another_protocol_is_passed_over(url: str, site: Site, piece: int) -> None:
    """Red if a request that offers h2c, as curl --http2 and Java's client send it, loses its body, its key or what
    follows on its connection."""
    body = b'{"prompt": "x"}'
    offer = b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\n" + offer
    sent = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\n" + offer.replace(b"Upgrade,", b"close, Upgrade,") + b"\r\n"
    everything = sent + chunked + b"GET /health HTTP/1.1\r\n" + offer + b"\r\n" + last
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    for start in range(0, len(everything), piece):
        writer.write(everything[start : start + piece])
        await asyncio.sleep(0)
    async with asyncio.timeout(HANG_GUARD_S):
        said = await reader.read()
    writer.close()
    assert said.count(b"HTTP/1.1 200 OK") == said.count(b"HTTP/1.1 ") == 4
    assert said.count(b"text_completion") == 2
    assert [answer.request.prompt_ids for answer in site.script.answers] == [site.tokenizer.encode_inline("x")] * 2


async def test_no_proxy(url: str, client: httpx.AsyncClient) -> None:
    """Red if CONNECT is read for ever as an offer that is passed over, or leaves its connection open."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(HANG_GUARD_S):
        said = await reader.read()
    writer.close()
    assert said.startswith(b"HTTP/1.1 400 ")
    assert said.count(b"HTTP/1.1 ") == 1
    assert (await client.get("/health")).status_code == 200


async def test_large_but_fair_headers(client: httpx.AsyncClient) -> None:
    """Red if the bound on headers counts bodies, or the requests before on the same connection."""
    for _ in range(3):
        headers = {"x-large": "y" * 40_000}
        body = {"prompt": "x", "user": "u" * 200_000}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200


# ------------------------------ pages


async def test_health_follows_the_engine(client: httpx.AsyncClient, site: Site) -> None:
    """Red if health says yes while the engine core is away."""
    for state, status, word in (
        (ClientState.SERVING, 200, "serving"),
        (ClientState.CONNECTING, 503, "starting"),
        (ClientState.STARTING, 503, "starting"),
        (ClientState.DRAINING, 503, "draining"),
        (ClientState.DEAD, 503, "dead"),
        (ClientState.CLOSED, 503, "dead"),
    ):
        site.engine.state = state
        for path in ("/health", "/ping"):
            response = await client.get(path)
            assert (response.status_code, response.json()["status"]) == (status, word)


async def test_health_turns_before_a_client_hears(client: httpx.AsyncClient, site: Site) -> None:
    """Red if a client can learn of the engine core's end while health says yes, or something else turns health."""
    site.script.steps = [*words("a", "b")[:1], ApiError(Code.INTERNAL, "this one failed")]
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 500
    assert ((await client.get("/health")).status_code, site.told_health) == (200, [])
    site.script.steps = [*words("a", "b")[:1], ApiError(Code.UNAVAILABLE, "the worker was killed")]
    assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 503
    assert site.told_health == [Health.DEAD]
    assert (await client.get("/health")).status_code == 503
    site.script.steps = [None, ApiError(Code.UNAVAILABLE, "the engine core was lost")]
    late = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
    await until(lambda: len(site.script.answers) == 3)
    site.engine.info = pb.GetInfoResponse()  # the welcome of a new session
    assert (await client.get("/health")).status_code == 200
    site.script.answers[-1].release()
    assert ((await late).status_code, (await client.get("/health")).status_code) == (503, 200)


async def test_pages(client: httpx.AsyncClient) -> None:
    """Red if a page or one of its files is missing, or loads anything from elsewhere."""
    page = await client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';" in policy
    assert "unsafe" not in policy
    named = re.findall(r'(?:src|href)="(/web/[^"]+)"', page.text)
    for path in WEB_FILES.keys() - {"/"}:
        text = (await client.get(path)).raise_for_status().text
        named += [f"/web/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        assert "https://" not in text
        assert not set(re.findall(r"http://\S+", text)) - {'http://www.w3.org/2000/svg";'}
    assert set(named) == WEB_FILES.keys() - {"/"}, "a file is asked for that isn't there, or never asked for"
    assert not re.search(r"https?://| on[a-z]+=|style=", page.text)
    assert (await client.get("/version")).json() == {"version": "1.2.3"}
    assert (await client.head("/health")).status_code == 200


async def test_metrics_page(client: httpx.AsyncClient, site: Site) -> None:
    """Red if a scrape doesn't ask the engine core anew, or fails when that is away."""
    site.engine.stats.gauges.pages_free = 77
    await client.post("/v1/completions", json={"prompt": "x"})
    text = (await client.get("/metrics")).text
    assert 'greenlane_engine_up{engine="1"} 1.0' in text
    assert 'greenlane_engine_pages_free{engine="1"} 77.0' in text
    assert 'greenlane_frontend_requests_total{frontend="1",outcome="stop"} 1.0' in text
    site.engine.stats.gauges.pages_free = 78
    assert 'greenlane_engine_pages_free{engine="1"} 78.0' in (await client.get("/metrics")).text
    site.engine.failure = ApiError(Code.UNAVAILABLE, "gone")
    text = (await client.get("/metrics")).text
    assert 'greenlane_engine_up{engine="1"} 0.0' in text
    assert "pages_free{" not in text


# ------------------------------ the openai package


async def test_openai_package(url: str, site: Site) -> None:
    """Red if the official client can't hold a conversation, streamed or not, or sees another kind of error."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["austen", "tiny/alias"]
        chat = await client.chat.completions.create(model="austen", messages=[{"role": "user", "content": "hi"}])
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("Hello world", "stop")
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 2
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="austen",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world"
        assert chunks[-1].usage == chat.usage
        whole = await client.completions.create(model="austen", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in whole.choices] == ["Hello world"] * 2
        pieces = [piece async for piece in await client.completions.create(model="austen", prompt="x", stream=True)]
        assert "".join(piece.choices[0].text for piece in pieces) == "Hello world"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.completions.create(model="gpt", prompt="x")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        site.script.refusal = ApiError(Code.RESOURCE_EXHAUSTED, "the queue is full", retry_after_s=1.0)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="austen", prompt="x")
        site.script.refusal = None
        site.script.steps = [*words("a", "b")[:1], ApiError(Code.UNAVAILABLE, "the engine core was lost")]
        with pytest.raises(openai.APIError, match="the engine core was lost"):
            async for _ in await client.completions.create(model="austen", prompt="x", stream=True):
                pass


async def test_no_prompt_in_the_logs(client: httpx.AsyncClient, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Red if any log record of a request, served or failed, holds text of its prompt or answer."""
    site.script.next_steps = [words(CANARY), [ApiError(Code.INTERNAL, "failed")]]
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": CANARY, "user": CANARY, "stop": CANARY})
        await client.post("/v1/completions", content=b'{"prompt": "' + CANARY.encode())
        await client.post("/v1/chat/completions", json={"messages": [{"role": CANARY}]})
        await client.get(f"/v1/models/{CANARY}")
    # The client's own loggers, and the access log: it is off, but pytest listens to it all the same.
    foreign = ("httpx", "httpcore", "uvicorn.access")
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(foreign)]
    assert not any(CANARY in message for message in ours)
