"""`greenlane bench`: its client against answers of every shape, its figures by value, its refusals and its picture."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from frontend.bench.client import BenchError, Target
from frontend.bench.command import _fitted, _Model
from frontend.bench.mix import Mix, Phase, Prompt, Run, figures
from frontend.bench.picture import draw
from frontend.cli import app
from frontend.trace.scene import Rect
from frontend.trace.svg import render_svg
from tests.certificates import Authority, key_file

HANG_GUARD_S = 20.0
MIX = Mix("m", 4000, decoders=2, output=100, inject_len=8, qps=200.0, n=3, seconds=0.05)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
Body = dict[str, Any]
Answer = Callable[[Body, asyncio.StreamWriter], Any]


@contextlib.asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[Target]:
    """A server that reads a request's JSON and leaves the rest to `answer`; it closes the connection afterwards."""

    handlers: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        try:
            await answer(json.loads(await reader.readexactly(length) or b"{}"), writer)
        except ConnectionError:
            pass  # the client left, as it may
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(HANG_GUARD_S):
            yield Target("127.0.0.1", listening.sockets[0].getsockname()[1])
            await asyncio.gather(*(handler for handler in handlers if handler is not None))
    finally:
        listening.close()


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


async def lines_of(answer: Answer) -> list[bytes]:
    lines: list[bytes] = []
    async with server(answer) as target:
        await target.fetch("POST", "/x", b"{}", lambda _, line: lines.append(line))
    return lines


# ------------------------------ the client


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_lines_survive_any_cut(size: int) -> None:
    """Red if a line is lost, doubled or cut where a read or a chunk ends."""

    async def answer(body: Body, writer: asyncio.StreamWriter) -> None:
        data = (
            HEAD
            + b"transfer-encoding: chunked\r\n\r\n"
            + chunked(b"data: on", b"e\n\ndata: two\n", b"\n")
            + b"0\r\n\r\n"
        )
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)

    assert await lines_of(answer) == [b"data: one", b"", b"data: two", b""]


@pytest.mark.parametrize("head", [HEAD + b"content-length: 9\r\n\r\n", HEAD + b"\r\n"], ids=["length", "close"])
async def test_answers_without_chunks(head: bytes) -> None:
    """Red if an answer of a stated length, or one that ends with its connection, is taken for a broken one."""

    async def answer(body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"one\ntwo\nx")

    assert await lines_of(answer) == [b"one", b"two", b"x"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 7\r\n\r\ntoo bad", "HTTP 400: too bad"),
        (b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 6\r\n\r\nno key", "HTTP 401: no key; --api-key-file"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(b"data: x\n"), "closed before the answer's end"),
        (HEAD + b"content-length: 100\r\n\r\nshort", "closed before the answer's end"),
        (b"", "closed before the answer's end"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no HTTP"),
    ],
)
async def test_broken_answers_are_told(data: bytes, message: str) -> None:
    """Red if half an answer counts as a whole one, or a refusal loses the server's own words."""

    async def answer(body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    with pytest.raises(BenchError, match=message):
        await lines_of(answer)


async def test_nobody_there() -> None:
    """Red if a server that can't be reached is anything but an error of one line."""
    with pytest.raises(BenchError, match=r"127\.0\.0\.1:1 can't be reached"):
        await Target("127.0.0.1", 1).fetch("GET", "/", b"", lambda _, line: None)


async def test_a_certificate_that_is_not_trusted_names_the_flag(tmp_path: Path) -> None:
    """Red if whoever loads a server with a certificate of its own isn't told how."""
    issued = Authority(tmp_path, "one").issue("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.cert, issued.key)
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(BenchError, match="--ssl-ca-certs FILE"):
        await Target("127.0.0.1", port, tls=ssl.create_default_context()).fetch("GET", "/", b"", lambda _, line: None)
    server.close()


def test_urls(tmp_path: Path) -> None:
    """Red if a URL with a path, a port or /v1 goes elsewhere, or a key travels in the clear."""
    target = Target.of("http://[::1]:8000/under/v1/")
    assert (target.host, target.port, target.prefix, target.tls) == ("::1", 8000, "/under", None)
    assert Target.of("http://h/v1").port == 80
    secured = Target.of("https://h", api_key_file=str(key_file(tmp_path, "the-key")))
    assert (secured.port, secured.authorization) == (443, "Bearer the-key")
    assert secured.tls is not None
    for url in ("h:8000", "ftp://h", "http://", "http://h:99999", "http://u@h", "http://h?x=1"):
        with pytest.raises(BenchError, match="--url") as refused:
            Target.of(url)
        assert refused.value.status == 2
    with pytest.raises(BenchError, match="in the clear"):
        Target.of("http://example.org", api_key_file=str(key_file(tmp_path, "the-key")))


# ------------------------------ the load


def completions(requests: list[Body], *, decoder: bytes = b"", pause_s: float = 0.002) -> Answer:
    """Decoders get an event of two tokens every `pause_s`, or `decoder` at once and no more; others one token."""

    async def answer(body: Body, writer: asyncio.StreamWriter) -> None:
        requests.append(body)
        writer.write(HEAD + b"\r\n")
        if body["max_tokens"] == 1:
            writer.write(b'data: {"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}\n\ndata: [DONE]\n\n')
        elif decoder:
            writer.write(decoder)
        else:
            for tokens in range(2, 1 << 20, 2):
                writer.write(b'data: {"choices":[{"text":"ab"}],"usage":{"completion_tokens":%d}}\n\n' % tokens)
                await writer.drain()
                await asyncio.sleep(pause_s)

    return answer


async def test_a_whole_run() -> None:
    """Red if decoders aren't all under way, prompts are alike or not all sent, or tokens are counted by events."""
    requests: list[Body] = []
    told: list[tuple[str, float]] = []
    async with server(completions(requests)) as target:
        phases = await Run(target, MIX, lambda what, done: told.append((what, done))).measure(
            ["undisturbed", "injected"]
        )
    assert [phase.name for phase in phases] == ["undisturbed", "injected"]
    assert [len(phase.prompts) for phase in phases] == [0, 3]
    assert [phase.alive for phase in phases] == [2, 2]
    assert sorted(len(body["prompt"]) for body in requests) == [8, 8, 8, 128, 128]
    assert len({tuple(body["prompt"]) for body in requests}) == 5
    assert all(10 <= token < 4000 for body in requests for token in body["prompt"])
    row = figures(MIX, phases[1])
    assert row["tokens_per_event"] == 2.0
    assert row["ttft_p50_ms"] is not None
    assert dict(told) == {"starting": 1.0, "undisturbed": 1.0, "injected": 1.0}
    assert phases[1].began >= phases[0].ended >= phases[0].began + MIX.seconds


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (b'data: {"error":{"message":"the worker is gone"}}\n\n', "the worker is gone"),
        (b"data: {nonsense}\n\n", "no completion"),
        (b'data: {"choices":[{}]}\n\n' * 3 + b"data: [DONE]\n\n", "ended after 3 events: let them run longer"),
    ],
)
async def test_a_run_that_fails_ends(decoder: bytes, message: str) -> None:
    """Red if a stream that ends in an error counts as measured, or the bench waits for decoders that are done."""
    async with server(completions([], decoder=decoder)) as target:
        with pytest.raises(BenchError, match=message):
            await Run(target, MIX, lambda what, done: None).measure(["undisturbed"])


def phases() -> list[Phase]:
    """Two decoders with an event every 10 ms from 0 s to 2 s, one of them silent from 0.89 to 1.11, which is in
    neither phase, and from 1.50 to 1.60."""
    steady = [(at / 100, 1) for at in range(201)]
    stalled = [(at, tokens) for at, tokens in steady if not (1.505 < at < 1.595 or 0.895 < at < 1.105)]
    injected = Phase(
        "injected", [steady, stalled], 1.0, 2.0, [Prompt(1.45, 1.60), Prompt(1.5, 1.75), Prompt(1.7, 1.8)], 2
    )
    return [Phase("undisturbed", [steady, stalled], 0.0, 1.0, alive=2), injected]


def test_figures_by_value() -> None:
    """Red if gaps outside the phase count, a rank is another's, or rates are over another time."""
    before, during = (figures(MIX, phase, "x") for phase in phases())
    assert (before["itl_p50_ms"], before["itl_max_ms"], before["ttft_p50_ms"], before["qps"]) == (10.0, 10.0, None, 0.0)
    assert before["decode_tok_s"] == 191.0
    assert (during["itl_p50_ms"], during["itl_p99_ms"], during["itl_max_ms"]) == (10.0, 10.0, 100.0)
    assert (during["ttft_p50_ms"], during["n"], during["qps"], during["inject_len"]) == (150.0, 3, 200.0, 8)
    assert (during["decode_tok_s"], during["span_s"], during["label"]) == (182.0, 1.0, "x")


def test_the_picture() -> None:
    """Red if a stall or a prompt isn't drawn, two prompts at once cover each other, or the SVG isn't one."""
    scene = draw("http://h", MIX, phases())
    bars = [shape for shape in scene.shapes if isinstance(shape, Rect)]
    prompts = [bar for bar in bars if bar.role == "prefill" and bar.title]
    assert [round(bar.width / prompts[2].width, 1) for bar in prompts] == [1.5, 2.5, 1.0]
    assert [bar.y for bar in prompts] == [prompts[0].y, prompts[0].y + 11, prompts[0].y]
    tall = max((bar for bar in bars if bar.role == "decode"), key=lambda bar: bar.height)
    assert "longest 100.00 ms" in tall.title
    assert all(bar.y >= 0 and bar.x + bar.width <= scene.width for bar in bars)
    ElementTree.fromstring(render_svg(scene))
    with pytest.raises(ValueError, match="no time"):
        draw("http://h", MIX, [Phase("undisturbed", [[]], 0.0, 1.0)])


# ------------------------------ the command


def test_sizes_follow_from_the_model() -> None:
    """Red if a load that can't fit is sent, or a server that doesn't tell its context is refused."""
    wanted = Mix("", 4000, 2, 0, 1000, 2.0, 3, 1.0)
    small = _Model("small", 2048)
    assert _fitted(wanted, [small, _Model("other")]).model == "small"
    assert _fitted(wanted, [small]).output == 1920
    assert _fitted(wanted, [_Model("m")]).output == _fitted(wanted, [_Model("m", 1 << 17)]).output == 8000
    for mix, message in (
        (Mix("x", 4000, 2, 0, 1000, 2.0, 3, 1.0), "the server has small"),
        (Mix("", 4000, 2, 0, 2048, 2.0, 3, 1.0), "--inject-len 2048: the model's context holds 2048"),
        (Mix("", 4000, 2, 1921, 100, 2.0, 3, 1.0), "--out 1921"),
    ):
        with pytest.raises(BenchError, match=message) as refused:
            _fitted(mix, [small])
        assert refused.value.status == 2


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--url=nowhere"], 2, "--url nowhere"),
        (["--decoders=0"], 2, "--decoders must be 1 at least"),
        (["--vocab=5"], 2, "--vocab must be 11 at least"),
        (["--qps=0"], 2, "--qps and --seconds"),
        (["--url=http://127.0.0.1:1"], 1, "can't be reached"),
        (["--url=https://h", "--ssl-ca-certs=/nowhere"], 2, "--ssl-ca-certs /nowhere can't be read"),
    ],
)
def test_refusals(flags: list[str], status: int, message: str) -> None:
    """Red if a mistake ends in a traceback, or with the status of another kind of failure."""
    result = CliRunner().invoke(app, ["bench", *flags])
    assert (result.exit_code, message in result.stderr) == (status, True), result.output
