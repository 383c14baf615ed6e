"""Frontends on other hosts: a real engine core behind TLS, certificates and keys, and real frontends before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from greenlane.engine.v1 import engine_pb2, engine_pb2_grpc

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
        yield json.loads(line)
    finally:
        started.terminate()
        started.wait(GUARD_S)


def test_a_frontend_gets_in_with_certificate_and_key(tmp_path: Path) -> None:
    """Red if the engine core takes a frontend without certificate or key, or a frontend that has both can't serve."""
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
        front = [f"--engine-address={engine['grpc']}", "--port=0", "--grpc-port=0"]
        front += [f"--engine-tls-ca-certs={authority.ca}", f"--engine-api-key-file={keys}"]
        front += [f"--engine-tls-certfile={shown.cert}", f"--engine-tls-keyfile={shown.key}"]
        with process("frontend", tmp_path / "frontend.log", *front) as ready:
            body = {"prompt": "x", "max_tokens": 3}
            answer = httpx.post(f"{ready['http']}/v1/completions", json=body, timeout=GUARD_S, trust_env=False)
            assert answer.json()["usage"]["completion_tokens"] == 3
            scrape = httpx.get(f"{ready['http']}/metrics", timeout=GUARD_S, trust_env=False).text
            assert "greenlane_engine_up 1.0" in scrape
    for name in ("engine", "frontend"):
        assert "the-key" not in (tmp_path / f"{name}.log").read_text()


def call_status(channel: grpc.Channel, authorization: str) -> grpc.StatusCode:
    """How a GetInfo call ends."""
    stub = engine_pb2_grpc.EngineStub(channel)
    try:
        stub.GetInfo(engine_pb2.GetInfoRequest(), metadata=(("authorization", authorization),), timeout=GUARD_S)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK
