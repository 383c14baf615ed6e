"""Frontends on other hosts: a real engine core behind TLS, certificates and keys, and real frontends before it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from greenlane.engine.v1 import engine_pb2, engine_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from tests.certificates import Authority, key_file

pytestmark = pytest.mark.e2e
MODEL = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen"
GUARD_S = 60.0
LOCAL = [("grpc.enable_http_proxy", 0)]


@contextmanager
def process(module: str, log: Path, *flags: str) -> Iterator[dict[str, Any]]:
    """A process of ours that got ready; what it announced. Ends with the context."""
    read_fd, write_fd = os.pipe()
    with log.open("wb") as out:
        started = subprocess.Popen(
            [sys.executable, "-P", "-m", *module.split(), f"--model={MODEL}", f"--ready-fd={write_fd}", *flags],
            pass_fds=(write_fd,),
            stdin=subprocess.DEVNULL,
            stderr=out,
        )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as pipe:
            line = pipe.readline()
        assert line, log.read_text()
        yield {**json.loads(line), "pid": started.pid}
    finally:
        started.terminate()
        started.wait(GUARD_S)


def test_a_frontend_gets_in_with_certificate_and_key(tmp_path: Path) -> None:
    """Red if the engine core takes a frontend without certificate or key, or a frontend that has both can't serve, or
    forgets its key in one of its calls."""
    authority, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    served, shown = authority.issue("engine"), clients.issue("frontend")
    keys = key_file(tmp_path, "the-key")
    flags = [*served.flags(), f"--ssl-ca-certs={clients.ca}", f"--api-key-file={keys}", "--address=127.0.0.1:0"]
    flags += ["--device=fake", "--load-format=dummy"]
    with process("engine_core engine", tmp_path / "engine.log", *flags) as engine:
        trust, mine = authority.ca.read_bytes(), (shown.key.read_bytes(), shown.cert.read_bytes())
        for credentials, metadata, status in (
            (grpc.ssl_channel_credentials(trust), "Bearer the-key", grpc.StatusCode.UNAVAILABLE),
            (grpc.ssl_channel_credentials(trust, *mine), "Bearer other", grpc.StatusCode.UNAUTHENTICATED),
            (grpc.ssl_channel_credentials(trust, *mine), "Bearer the-key", grpc.StatusCode.OK),
        ):
            with grpc.secure_channel(engine["grpc"], credentials, options=LOCAL) as channel:
                assert call_status(channel, metadata) is status
        front = [f"--engine-address={engine['grpc']}", "--port=0", "--grpc-port=0", "--vllm-grpc-port=0"]
        front += [f"--engine-tls-ca-certs={authority.ca}", f"--engine-api-key-file={keys}"]
        front += [f"--engine-tls-certfile={shown.cert}", f"--engine-tls-keyfile={shown.key}"]
        with process("frontend", tmp_path / "frontend.log", *front) as ready:
            body = {"prompt": "x", "max_tokens": 3}
            answer = httpx.post(f"{ready['http']}/v1/completions", json=body, timeout=GUARD_S, trust_env=False)
            assert answer.json()["usage"]["completion_tokens"] == 3
            scrape = httpx.get(f"{ready['http']}/metrics", timeout=GUARD_S, trust_env=False).text
            assert 'greenlane_engine_up{engine="1"} 1.0' in scrape
            with grpc.insecure_channel(ready["vllm"], options=LOCAL) as channel:
                flush = common_pb2.FlushCacheRequest()
                assert vllm_engine_pb2_grpc.VllmEngineStub(channel).FlushCache(flush, timeout=GUARD_S).success
    for name in ("engine", "frontend"):
        assert "the-key" not in (tmp_path / f"{name}.log").read_text()


def test_two_cores_behind_one_frontend(tmp_path: Path) -> None:
    """Red if a frontend uses one core alone, or the end of one of them ends more than its own part."""
    flags = ("--device=fake", "--load-format=dummy", "--address=127.0.0.1:0")
    with process("engine_core engine", tmp_path / "one.log", *flags) as one, ExitStack() as later:
        two = later.enter_context(process("engine_core engine", tmp_path / "two.log", *flags))
        front = (f"--engine-address={one['grpc']},{two['grpc']}", "--port=0", "--grpc-port=0")
        ready = later.enter_context(process("frontend", tmp_path / "frontend.log", *front))
        with httpx.Client(base_url=ready["http"], timeout=GUARD_S, trust_env=False) as client:

            def outcomes() -> list[int]:
                body = {"prompt": "x", "max_tokens": 3}
                return [client.post("/v1/completions", json=body).status_code for _ in range(8)]

            def accepted(engine: int) -> float:
                text = client.get("/metrics").text
                name = f'greenlane_engine_sequences_accepted_total{{engine="{engine}"}} '
                return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))

            while client.get("/metrics").text.count("greenlane_engine_up{engine") < 2 or accepted(2) == 0:
                assert outcomes() == [200] * 8
                with ThreadPoolExecutor(8) as pool:
                    assert set(pool.map(lambda _: outcomes()[0], range(8))) == {200}
            assert accepted(1) > 0
            os.kill(two["pid"], signal.SIGKILL)
            while 'greenlane_engine_up{engine="2"} 1.0' in client.get("/metrics").text:
                pass
            assert client.get("/health").status_code == 200
            assert outcomes() == [200] * 8


def call_status(channel: grpc.Channel, authorization: str) -> grpc.StatusCode:
    """How a GetInfo call ends."""
    stub = engine_pb2_grpc.EngineStub(channel)
    try:
        stub.GetInfo(engine_pb2.GetInfoRequest(), metadata=(("authorization", authorization),), timeout=GUARD_S)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK
