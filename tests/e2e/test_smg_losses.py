"""smg in front of real servers: what becomes of its clients' streams when servers go, drain or come back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from scripts.serving import TINY
from tests.e2e.conftest import MakeServer, MakeSmg
from tests.e2e.harness import GUARD_S, until
from tests.e2e.smg import CHAT, COMPLETION, ENDLESS, VLLM, Smg, ask, chat_text, gateway_answers, open_sequences

pytestmark = pytest.mark.e2e


class Stream:
    """A streamed completion on a thread of its own, known to be under way, then watched to its end."""

    def __init__(self, gateway: Smg, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.done = False
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(gateway, body), daemon=True)
        self._thread.start()
        assert self._began.wait(GUARD_S), "nothing came"

    def _run(self, gateway: Smg, body: dict[str, Any]) -> None:
        with gateway.client() as client, client.stream("POST", "/v1/completions", json={**body, "stream": True}) as got:
            for line in got.iter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))
                    self._began.set()
        self._began.set()

    def join(self) -> Stream:
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive(), "the stream never ended"
        return self

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def finish_reason(self) -> str | None:
        reasons = [choice["finish_reason"] for event in self.events for choice in event.get("choices", ())]
        return next((reason for reason in reasons if reason), None)


def test_worker_killed_and_back(make_server: MakeServer, make_smg: MakeSmg) -> None:
    """Red if a stream that lost its worker ends as if all were well, or if the gateway needs a restart afterwards or
    takes the old prefix cache for the new one."""
    server = make_server(VLLM)
    gateway = make_smg(server, policy="cache_aware")
    prompt = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 8
    ask(gateway, "/v1/completions", {**COMPLETION, "prompt": prompt})
    until(lambda: gateway.blocks(server) == server.stats().gauges.pages_cached > 8, "the gateway knows the old cache")
    stream = Stream(gateway, ENDLESS)
    os.kill(server.pid("worker"), signal.SIGKILL)
    assert stream.join().error is not None
    assert stream.finish_reason is None
    until(lambda: gateway_answers(gateway), "serving again")
    until(lambda: gateway.healthy() == {server.vllm}, "healthy again")
    until(lambda: gateway.blocks(server) == server.stats().gauges.pages_cached < 8, "the gateway knows the new cache")


def test_two_engines_and_a_drain(make_server: MakeServer, make_smg: MakeSmg) -> None:
    """Red if only one of two engines gets requests, if a drain cuts off a stream, or if the gateway's clients notice
    that one of the two has gone."""
    first, second = make_server(VLLM), make_server(VLLM)
    gateway = make_smg(first, second)
    served = [server.stats().counters.sequences_accepted for server in (first, second)]
    for _ in range(6):
        ask(gateway, "/v1/completions", COMPLETION)
    assert all(
        server.stats().counters.sequences_accepted > before
        for server, before in zip((first, second), served, strict=True)
    )
    streams = [Stream(gateway, {**ENDLESS, "max_tokens": 800}) for _ in range(2)]
    assert [open_sequences(server) for server in (first, second)] == [1, 1]
    first.process.send_signal(signal.SIGTERM)
    until(lambda: first.health() != 200, "draining")
    for _ in range(6):
        ask(gateway, "/v1/completions", COMPLETION)
    assert [stream.join().finish_reason for stream in streams] == ["length", "length"]
    assert [stream.error for stream in streams] == [None, None]
    assert first.process.wait(GUARD_S) == 0
    for _ in range(6):
        ask(gateway, "/v1/completions", COMPLETION)
    until(lambda: gateway.healthy() == {second.vllm}, "the first one is out of routing")


def test_tokenizer_from_the_server(tmp_path: Path, make_server: MakeServer, make_smg: MakeSmg) -> None:
    """Red if a gateway on another machine, which doesn't have the model's folder, can't tokenize."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    server = make_server(VLLM, model=folder)
    expected = chat_text(ask(server, "/v1/chat/completions", CHAT))
    folder.rename(tmp_path / "elsewhere")
    assert chat_text(ask(make_smg(server), "/v1/chat/completions", CHAT)) == expected
