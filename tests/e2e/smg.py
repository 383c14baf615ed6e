"""A real smg (an inference gateway) in front of our servers, as an operator starts it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.harness import GUARD_S, Server, until

QUICK = ["--worker-startup-check-interval=1", "--health-check-interval-secs=1", "--health-failure-threshold=1"]
"""Registers and notices changes within seconds, so that tests needn't wait for a minute."""

VLLM = "--vllm-grpc-port=0"
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is a whale?"}],
    "max_tokens": 12,
    "temperature": 0,
}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "It is a truth", "max_tokens": 12, "temperature": 0}
ENDLESS: dict[str, Any] = {**COMPLETION, "max_tokens": 1900, "ignore_eos": True, "temperature": 1}


class Smg:
    """One gateway, with its defaults and `flags`."""

    def __init__(self, log: Path, *servers: Server, flags: Sequence[str] = ()) -> None:
        """Returns once it routes to every server."""
        self._log = log
        self._servers = servers
        port, metrics_port = free_port(), free_port()
        self.http = f"http://127.0.0.1:{port}"
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        command = [str(Path(sys.executable).with_name("smg")), "launch", "--host=127.0.0.1", f"--port={port}", *QUICK]
        command += ["--prometheus-host=127.0.0.1", f"--prometheus-port={metrics_port}", *flags]
        command += ["--health-success-threshold=1", "--worker-urls", *(f"grpc://{each.vllm}" for each in servers)]
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            until(self.routes_to_all, "smg routes to every worker")
        except BaseException:
            self.stop()
            raise

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.http, timeout=GUARD_S, trust_env=False)

    def workers(self) -> list[dict[str, Any]]:
        """What it knows of its workers; empty as long as it doesn't answer."""
        try:
            with self.client() as client:
                answer: dict[str, Any] = client.get("/workers").raise_for_status().json()
        except httpx.HTTPError:
            return []
        return list(answer["workers"])

    def healthy(self) -> set[str]:
        """Addresses that it routes to."""
        return {each["url"].removeprefix("grpc://") for each in self.workers() if each["is_healthy"]}

    def blocks(self, server: Server) -> int:
        """KV blocks that it believes that server's cache to hold."""
        text = httpx.get(self._metrics, timeout=GUARD_S, trust_env=False).text
        wanted = f'smg_kv_index_blocks{{worker="grpc://{server.vllm}"}} '
        found = [line.removeprefix(wanted) for line in text.splitlines() if line.startswith(wanted)]
        return int(float(found[0])) if found else 0

    def routes_to_all(self) -> bool:
        assert self.process.poll() is None, self._log.read_text(errors="replace")
        if self.healthy() != {server.vllm for server in self._servers}:
            return False
        with self.client() as client:  # the tokenizer is loaded beside the registration
            return client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1}).is_success

    def stop(self) -> None:
        """At once: asked politely, it takes five seconds."""
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    """A port that was free a moment ago: smg can't be asked which one it took."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def ask(base: Server | Smg, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a server or of a gateway to the same question."""
    with base.client() as client:
        answer: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
        return answer


def chat_text(answer: dict[str, Any], choice: int = 0) -> str:
    return str(answer["choices"][choice]["message"]["content"])


def open_sequences(server: Server) -> int:
    gauges = server.stats().gauges
    return gauges.running + gauges.waiting


def gateway_answers(gateway: Smg) -> bool:
    with gateway.client() as client:
        return client.post("/v1/completions", json=COMPLETION).is_success
