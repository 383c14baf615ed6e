"""Ports and socket files that are taken, left over or not ours; and what logs hold."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from scripts.serving import TINY, ServeError
from tests.e2e.conftest import MakeServer
from tests.e2e.harness import Server, serving, until

pytestmark = pytest.mark.e2e

CANARY = "xylophone-marmalade-4711"


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_port_in_use(tmp_path: Path, flag: str) -> None:
    """Red if a taken port is retried, or if the message doesn't name the flag."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        log = tmp_path / "serve.log"
        with pytest.raises(ServeError):
            Server(log, "--device=fake", f"{flag}={taken.getsockname()[1]}")
    text = log.read_text()
    assert f"error: {flag}" in text
    assert "worker_started" not in text, "found only after the model was loading"
    assert "restart" not in text


@pytest.mark.parametrize(("host", "frontends"), [("::1", 1), ("[::1]", 1), ("[::1]", 2)])
def test_ipv6(make_server: MakeServer, host: str, frontends: int) -> None:
    """Red if an IPv6 address can't be listened on, with or without brackets, or a printed address can't be called."""
    flags = (f"--host={host}", f"--frontends={frontends}", "--vllm-grpc-port=0", f"--vllm-grpc-host={host}")
    server = make_server("--device=fake", *flags)
    assert server.http.startswith("http://[::1]:")
    assert server.health() == 200
    assert [each.partition("]")[0] for each in (server.grpc, server.vllm)] == ["[::1", "[::1"]
    assert serving(server.grpc)
    assert serving(server.vllm)


def test_stale_socket_is_replaced(tmp_path: Path, make_server: MakeServer) -> None:
    """Red if the socket file that a killed core left behind keeps its successor from listening."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    path = folder / "engine.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert stat.S_ISSOCK(path.stat().st_mode)
    server = make_server("--device=fake", f"--engine-address=unix:{path}")
    assert server.engine == f"unix:{path}"
    assert server.health() == 200


def test_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """Red if a file that is no socket is deleted because it stands where the socket should."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    path = folder / "engine.sock"
    path.write_text("precious")
    log = tmp_path / "serve.log"
    with pytest.raises(ServeError):
        Server(log, "--device=fake", f"--engine-address=unix:{path}")
    assert path.read_text() == "precious"
    assert str(path) in log.read_text()


def test_local_sockets_are_private_and_removed(make_server: MakeServer) -> None:
    """Red if another user could connect to the engine core, or if stopping leaves folders behind."""
    server = make_server("--device=fake")
    folder = Path(server.engine.removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()
    assert server.stop() == 0
    assert not folder.exists()


def test_frontend_keeps_its_ports_over_a_restart(make_server: MakeServer) -> None:
    """Red if a restarted frontend is found elsewhere than where it was announced."""
    server = make_server("--device=fake")
    os.kill(server.pid("frontend"), signal.SIGKILL)
    until(lambda: "frontend 1 is serving again" in server.logged(), "restarted")
    assert server.health() == 200


def test_logs_hold_no_prompt_text(tmp_path: Path, make_server: MakeServer) -> None:
    """Red if any process logs what a client said, at the most talkative level: served, refused or failed."""
    crash = tmp_path / "crash"
    server = make_server("--log-level=debug", f"--crash-dir={crash}")
    message = {"role": "user", "content": CANARY}
    with server.client() as client:
        for fields in (
            {"max_tokens": 8},
            {"max_tokens": 10**6},
            {"temperature": 900},
            {"stop": [CANARY], "max_tokens": 8},
            {"n": CANARY},
        ):
            body = {"model": "tiny", "messages": [message], "cache_salt": CANARY, "user": CANARY, **fields}
            client.post("/v1/chat/completions", json=body)
        client.post("/v1/completions", content=f'{{"prompt": "{CANARY}'.encode())
        client.post("/tokenize", json={"model": "tiny", "prompt": CANARY})
        with client.stream(
            "POST",
            "/v1/completions",
            json={"model": "tiny", "prompt": CANARY, "max_tokens": 1900, "ignore_eos": True, "stream": True},
        ) as response:
            for number, _ in enumerate(response.iter_lines()):
                if number == 0:
                    os.kill(server.pid("worker"), signal.SIGABRT)
    until(lambda: server.health() == 200, "serving again")
    assert server.stop() == 0
    written = [server.log, *(path for path in crash.rglob("*") if path.is_file())]
    assert len(written) > 1, "no crash report was written"
    assert [path.name for path in written if CANARY in path.read_text(errors="replace")] == []
    assert str(TINY) in server.logged()
