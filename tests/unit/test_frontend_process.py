"""A real frontend process before a scripted engine core: flags, readiness, loss, draining, logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
import pytest_asyncio
from greenlane.engine.v1 import engine_pb2 as pb
from greenlane.text.v1 import text_pb2, text_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend.__main__ import main
from tests.unit.scripted_engine import FIXTURE, ScriptedEngine, ScriptedSession, finish, info, listening, socket_folder

GUARD_S = 60.0
CANARY = "the-canary-sang-at-dawn"
ROOT = Path(__file__).resolve().parents[2]
FLAGS = [f"--model={FIXTURE}", "--engine-address=unix:/nowhere"]


# ------------------------------ flags


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model=x"], "--engine-address"),
        ([*FLAGS, "--port=70000"], "--port"),
        ([*FLAGS, "--port=http"], "--port"),
        ([*FLAGS, "--grpc-port=-1"], "--grpc-port"),
        ([*FLAGS, "--port=5000", "--grpc-port=5000"], "--grpc-port"),
        ([*FLAGS, "--vllm-grpc-port=65536"], "--vllm-grpc-port"),
        ([*FLAGS, "--vllm-grpc-port=50051"], "--grpc-port and --vllm-grpc-port"),
        ([*FLAGS, "--vllm-grpc-host=0.0.0.0"], "--vllm-grpc-host"),
        ([*FLAGS, "--host=0.0.0.0"], "--host"),
        ([*FLAGS, "--host=example.org"], "--host"),
        ([*FLAGS, "--engine-address=unix:relative"], "--engine-address"),
        ([*FLAGS, "--engine-address=host"], "--engine-address"),
        ([*FLAGS, "--engine-address=host:0"], "--engine-address"),
        ([*FLAGS, "--engine-address=unix:/a,unix:/a"], "--engine-address"),
        ([*FLAGS, "--engine-address=unix:/a,"], "--engine-address"),
        ([*FLAGS, "--engine-address=10.0.0.1:7000", "--engine-api-key-file=/k"], "in the clear"),
        ([*FLAGS, "--engine-tls-ca-certs=/c"], "go with --engine-address host:port"),
        ([*FLAGS, "--engine-address=h:1", "--engine-tls-certfile=/c"], "--engine-tls-keyfile"),
        ([*FLAGS, "--api-key-file=/nowhere/keys"], "--api-key-file /nowhere/keys can't be read"),
        ([*FLAGS, "--drain-timeout=-1"], "--drain-timeout"),
        ([*FLAGS, "--max-body-bytes=5"], "--max-body-bytes"),
        ([*FLAGS, "--engine-timeout=0"], "--engine-timeout"),
        ([*FLAGS, "--request-timeout=nan"], "--request-timeout"),
        ([*FLAGS, "--log-level=loud"], "--log-level"),
        ([*FLAGS, "--served-model-name="], "--served-model-name"),
        ([*FLAGS, "--prot=1"], "--prot"),
    ],
)
def test_refused_flags(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a flag that can't be served starts something, or its refusal doesn't name it in one line."""
    assert main([*flags, "--check-flags"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert named in said
    assert said.count("\n") == 1


def test_good_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """Red if flags that can be served are refused, or checking them starts anything."""
    flags = ["--served-model-name=a", "--served-model-name=b", "--host=::1", "--port=0", "--grpc-port=0"]
    assert main([*FLAGS, *flags, "--request-timeout=30", "--check-flags"]) == 0
    private = ["--vllm-grpc-port=50052", "--vllm-grpc-host=0.0.0.0", "--insecure-listen"]
    assert main([*FLAGS, *private, "--check-flags"]) == 0
    assert capsys.readouterr().err == ""


# ------------------------------ the process


class Front:
    """One frontend process."""

    def __init__(self, process: asyncio.subprocess.Process, ready: asyncio.StreamReader, log: Path) -> None:
        self.process = process
        self.log = log
        self._ready = ready
        self.http, self.grpc = "", ""

    async def ready(self) -> None:
        async with asyncio.timeout(GUARD_S):
            line = await self._ready.readline()
        told = json.loads(line)
        assert told.keys() == {"http", "grpc"}
        assert await self._ready.read() == b""
        self.http, self.grpc = told["http"], told["grpc"]

    async def ended(self) -> int:
        async with asyncio.timeout(GUARD_S):
            return await self.process.wait()

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.http, timeout=GUARD_S, trust_env=False)

    def text(self, channel: grpc.aio.Channel) -> text_pb2_grpc.TextStub:
        return text_pb2_grpc.TextStub(channel)


@contextlib.asynccontextmanager
async def front(folder: Path, *flags: str) -> AsyncIterator[Front]:
    """A frontend on free ports whose engine core is (or will be) at folder/engine."""
    read_fd, write_fd = os.pipe()
    log = folder / "log"
    argv = [sys.executable, "-P", "-m", "frontend", f"--model={FIXTURE}", f"--engine-address=unix:{folder / 'engine'}"]
    argv += ["--port=0", "--grpc-port=0", "--log-level=debug", f"--ready-fd={write_fd}", *flags]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "http_proxy": "http://127.0.0.1:9"}
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=folder, env=environment, pass_fds=(write_fd,), stdin=asyncio.subprocess.DEVNULL, stderr=stderr
        )
    os.close(write_fd)
    reader = asyncio.StreamReader()
    pipe = os.fdopen(read_fd, "rb")
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield Front(process, reader, log)
    finally:
        transport.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest_asyncio.fixture
async def folder() -> AsyncIterator[Path]:
    async with socket_folder() as path:
        yield path


async def answer(session: ScriptedSession, count: int) -> None:
    """Accept request number `count` and give it two tokens and an end."""
    add = await session.next_add(count)
    await session.send(accepted=[add.number], tokens=[(add.number, 100), (add.number, 101)])
    await session.send(finishes=[finish(add.number, prompt_tokens=1, output_tokens=2)])


async def serving(client: httpx.AsyncClient) -> None:
    """Until the frontend has taken the engine core's session for its own."""
    async with asyncio.timeout(GUARD_S):
        while (await client.get("/health")).status_code != 200:
            pass


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": CANARY, **fields})


@pytest.mark.e2e
async def test_ready_served_and_stopped(folder: Path) -> None:
    """Red if ready comes before the engine session, an edge doesn't answer, or a log line quotes a prompt."""
    async with front(folder, "--served-model-name=tiny") as process:
        engine = ScriptedEngine(info())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await process._ready.readline()
        async with listening(engine, folder / "engine"):
            session = await engine.session()
            await process.ready()
            async with process.client() as client:
                assert (await client.get("/health")).status_code == 200
                asking = asyncio.ensure_future(ask(client, model="tiny"))
                await answer(session, 1)
                assert (await asking).json()["usage"]["completion_tokens"] == 2
                assert 'greenlane_engine_up{engine="1"} 1.0' in (await client.get("/metrics")).text
            async with grpc.aio.insecure_channel(process.grpc, options=[("grpc.enable_http_proxy", 0)]) as channel:
                stub = process.text(channel)
                call = stub.Generate(text_pb2.GenerateRequest(prompt=CANARY))
                await answer(session, 2)
                assert [len(m.deltas) for m in [m async for m in call]][-1] == 0
            process.process.send_signal(signal.SIGTERM)
            assert await process.ended() == 0
        log = process.log.read_text()
        assert CANARY not in log
        assert all(json.loads(line)["event"] for line in log.splitlines())


@pytest.mark.e2e
async def test_lost_engine(folder: Path) -> None:
    """Red if an open request hangs when the engine core is lost, health still says yes, or nothing reconnects."""
    async with front(folder) as process:
        engine = ScriptedEngine(info())
        async with listening(engine, folder / "engine"):
            session = await engine.session()
            await process.ready()
            client = process.client()
            asking = asyncio.ensure_future(ask(client))
            await session.next_add()
        response = await asking
        assert (response.status_code, response.json()["error"]["type"]) == (503, "service_unavailable_error")
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert (await ask(client)).status_code == 503
        engine = ScriptedEngine(info(instance_id="two"))
        async with listening(engine, folder / "engine"):
            session = await engine.session()
            await serving(client)
            asking = asyncio.ensure_future(ask(client))
            await answer(session, 1)
            assert (await asking).status_code == 200
            await client.aclose()


@pytest.mark.e2e
async def test_dying_engine(folder: Path) -> None:
    """Red if the engine core's last words reach a client before health has turned, on either edge."""
    engine = ScriptedEngine(info())
    async with listening(engine, folder / "engine"), front(folder) as process:
        session = await engine.session()
        await process.ready()
        options = [("grpc.enable_http_proxy", 0)]
        async with process.client() as client, grpc.aio.insecure_channel(process.grpc, options=options) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            asking = asyncio.ensure_future(ask(client))
            add = await session.next_add()
            error = pb.Error(code=14, message="the worker was killed")
            await session.send(accepted=[add.number], finishes=[finish(add.number, "ERROR", error=error)])
            assert (await asking).status_code == 503
            assert (await client.get("/health")).status_code == 503
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            session.end()
            await engine.session()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.e2e
async def test_draining(folder: Path) -> None:
    """Red if SIGTERM cuts off an open request, takes a new one, or the process doesn't end with status 0 after it."""
    engine = ScriptedEngine(info())
    async with listening(engine, folder / "engine"), front(folder) as process:
        session = await engine.session()
        await process.ready()
        async with process.client() as client:
            asking = asyncio.ensure_future(ask(client))
            await session.next_add()
            process.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(GUARD_S):
                while (await client.get("/health")).status_code == 200:
                    pass
            refused = await ask(client)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            await answer(session, 1)
            assert (await asking).status_code == 200
        assert await process.ended() == 0


@pytest.mark.e2e
async def test_stopped_at_once(folder: Path) -> None:
    """Red if a second signal waits for open requests, or cuts them off without a word."""
    engine = ScriptedEngine(info())
    async with listening(engine, folder / "engine"), front(folder) as process:
        session = await engine.session()
        await process.ready()
        async with process.client() as client:
            asking = asyncio.ensure_future(ask(client))
            await session.next_add()
            process.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(GUARD_S):
                while (await client.get("/health")).status_code == 200:
                    pass
            process.process.send_signal(signal.SIGINT)
            assert (await asking).status_code == 503
        assert await process.ended() == 0


@pytest.mark.e2e
@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
async def test_port_in_use(folder: Path, flag: str) -> None:
    """Red if a taken port is shared, or refused without naming the flag."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with front(folder, f"{flag}={taken.getsockname()[1]}") as process:
            assert await process.ended() == 2
            assert f"error: {flag} {taken.getsockname()[1]}" in process.log.read_text()


@pytest.mark.e2e
async def test_wrong_tokenizer(folder: Path) -> None:
    """Red if a frontend serves a model with another model's tokenizer."""
    engine = ScriptedEngine(info(vocab_size=300))
    async with listening(engine, folder / "engine"), front(folder) as process:
        assert await process.ended() == 2
        assert "give both the same model" in process.log.read_text()


@pytest.mark.e2e
async def test_no_model(folder: Path) -> None:
    """Red if a folder without a tokenizer is served, or refused without saying what is missing."""
    async with front(folder, f"--model={folder}") as process:
        assert await process.ended() == 2
        assert "tokenizer.json is missing" in process.log.read_text()
