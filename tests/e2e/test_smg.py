"""smg, a real gateway, in front of real servers: what its clients get, and what it knows of its servers."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from scripts.serving import ServeError
from tests.e2e.conftest import MakeServer, MakeSmg
from tests.e2e.harness import Server, until
from tests.e2e.smg import CHAT, COMPLETION, ENDLESS, VLLM, Smg, ask, chat_text, gateway_answers, open_sequences

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Smg]]:
    """A server and a gateway in front of it; whoever uses them leaves both serving."""
    folder = tmp_path_factory.mktemp("smg")
    server = Server(folder / "serve.log", VLLM)
    try:
        gateway = Smg(folder / "smg.log", server)
        yield server, gateway
        gateway.stop()
    finally:
        assert server.stop() == 0, server.logged()


# ------------------------------ answers


def test_registration(pair: tuple[Server, Smg]) -> None:
    """Red if the gateway has to guess what it routes to, or polls for a load that is pushed to it."""
    _, gateway = pair
    (worker,) = gateway.workers()
    assert (worker["status"], worker["runtime_type"], worker["model_id"]) == ("ready", "vllm", "tiny")
    (model,) = worker["models"]
    assert (model["context_length"], model["hf_model_type"]) == (2048, "qwen3")
    until(lambda: gateway.workers()[0].get("engine_load", {}).get("version") == "pushed", "load is pushed")
    (load,) = gateway.workers()[0]["engine_load"]["loads"]
    assert load["max_running_requests"] == 64
    assert load["max_total_num_tokens"] > 0


def test_chat(pair: tuple[Server, Smg]) -> None:
    """Red if a chat through the gateway has another text or other counts than the server's own answer, or if it
    doesn't stream."""
    server, gateway = pair
    direct, routed = ask(server, "/v1/chat/completions", CHAT), ask(gateway, "/v1/chat/completions", CHAT)
    assert chat_text(routed) == chat_text(direct).strip() or chat_text(routed) == chat_text(direct)
    assert routed["choices"][0]["finish_reason"] == "length"
    assert [routed["usage"][key] for key in ("prompt_tokens", "completion_tokens")] == [
        direct["usage"][key] for key in ("prompt_tokens", "completion_tokens")
    ]
    with openai.OpenAI(base_url=f"{gateway.http}/v1", api_key="none") as client:
        chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == chat_text(routed)
    assert len([text for text in texts if text]) > 3
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_completion(pair: tuple[Server, Smg]) -> None:
    """Red if a completion differs, streamed or not, or a sequence of n is lost."""
    server, gateway = pair
    direct = ask(server, "/v1/completions", COMPLETION)["choices"][0]["text"]
    routed = ask(gateway, "/v1/completions", {**COMPLETION, "n": 3})
    assert [choice["text"] for choice in routed["choices"]] == [direct] * 3
    assert routed["usage"]["completion_tokens"] == 36
    with openai.OpenAI(base_url=f"{gateway.http}/v1", api_key="none") as client:
        chunks = list(client.completions.create(**COMPLETION, n=2, stream=True))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: direct, 1: direct}


def test_stop(pair: tuple[Server, Smg]) -> None:
    """Red if the engine core works on behind a stop string, or the gateway isn't told why the text ended."""
    server, gateway = pair
    whole = ask(server, "/v1/completions", COMPLETION)["choices"][0]["text"]
    stop = whole[8:14]
    before = server.stats().counters
    routed = ask(gateway, "/v1/completions", {**COMPLETION, "max_tokens": 1500, "stop": [stop]})
    (choice,) = routed["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    until(server.idle, "idle")
    after = server.stats().counters
    assert after.finished_abort == before.finished_abort + 1
    assert after.output_tokens - before.output_tokens < 100


def test_logprobs(pair: tuple[Server, Smg]) -> None:
    """Red if logprobs belong to other tokens than the text's, or lose their alternatives."""
    server, gateway = pair
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    direct, routed = (ask(each, "/v1/chat/completions", body) for each in (server, gateway))
    ours, theirs = (each["choices"][0]["logprobs"]["content"] for each in (direct, routed))
    assert [entry["token"] for entry in theirs] == [entry["token"] for entry in ours]
    for mine, entry in zip(ours, theirs, strict=True):
        assert entry["logprob"] == pytest.approx(mine["logprob"], abs=1e-3)
        assert [top["token"] for top in entry["top_logprobs"]] == [top["token"] for top in mine["top_logprobs"]]


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(pair: tuple[Server, Smg], stream: bool) -> None:
    """Red if what a client wants its answer to follow is lost on the way through the gateway."""
    _, gateway = pair
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "sex": {"enum": ["f", "m"]}},
        "required": ["age", "sex"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
    with openai.OpenAI(base_url=f"{gateway.http}/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {**CHAT, "max_tokens": 100, "response_format": wanted, "stream": stream}
        answer = client.chat.completions.create(**ask)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        else:
            text = answer.choices[0].message.content
    person = json.loads(text)
    assert person.keys() == {"age", "sex"}
    assert 0 <= person["age"] <= 99
    assert person["sex"] in ("f", "m")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called(pair: tuple[Server, Smg], stream: bool) -> None:
    """Red if the constraint with which the gateway asks for a call is lost: it reads the call in the answer itself."""
    _, gateway = pair
    schema = {
        "type": "object",
        "properties": {"town": {"enum": ["Bath", "York"]}},
        "required": ["town"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    chosen = {"type": "function", "function": {"name": "weather"}}
    with openai.OpenAI(base_url=f"{gateway.http}/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {**CHAT, "max_tokens": 100, "tools": [tool], "tool_choice": chosen, "stream": stream}
        answer = client.chat.completions.create(**ask)
        if stream:
            parts = [part for chunk in answer for part in chunk.choices[0].delta.tool_calls or []]
            name = "".join(part.function.name or "" for part in parts)
            arguments = "".join(part.function.arguments or "" for part in parts)
        else:
            (call,) = answer.choices[0].message.tool_calls
            name, arguments = call.function.name, call.function.arguments
    assert name == "weather"
    assert json.loads(arguments)["town"] in ("Bath", "York")


# ------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 5000}, "max_tokens"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}},
            "nothing",
        ),
    ],
)
def test_bad_requests(pair: tuple[Server, Smg], fields: dict[str, Any], named: str) -> None:
    """Red if the client isn't told what was wrong, or the gateway takes the server for broken and tries again."""
    _, gateway = pair
    with gateway.client() as client:
        answer = client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_full_queue(make_server: MakeServer, make_smg: MakeSmg) -> None:
    """Red if a full queue is anything but 429 to the gateway's client."""
    server = make_server(VLLM, "--max-num-seqs=1", "--max-queue=1", "--worker-timeout=300", "--gpu-wait-timeout=300")
    gateway = make_smg(server)
    until(server.idle, "idle")
    worker = server.pid("worker")
    os.kill(worker, signal.SIGSTOP)
    try:
        for taken in (1, 2):
            threading.Thread(target=server.complete, kwargs={"max_tokens": 4}, daemon=True).start()
            until(functools.partial(holds, server, taken), "the queue is full")
        with gateway.client() as client:
            answer = client.post("/v1/completions", json=COMPLETION)
        assert answer.status_code == 429, answer.text
    finally:
        os.kill(worker, signal.SIGCONT)
    until(lambda: gateway_answers(gateway), "answers again")


def holds(server: Server, count: int) -> bool:
    return open_sequences(server) == count


# ------------------------------ prefix caches


def test_routing_by_what_caches_hold(make_server: MakeServer, make_smg: MakeSmg) -> None:
    """Red if the gateway doesn't know what is in the servers' prefix caches: prompts that it never saw before go to the
    server that has them, and are forgotten when their pages go."""
    servers = [make_server(VLLM) for _ in range(2)]
    gateway = make_smg(*servers, policy="cache_aware")
    prompts = [(f"{word} " * 60).strip() for word in ("whale", "letter", "sister", "garden")]
    for number, prompt in enumerate(prompts):
        ask(servers[number % 2], "/v1/completions", {**COMPLETION, "prompt": prompt})
    for server in servers:
        until(functools.partial(knows_all, gateway, server), "the gateway knows the server's pages")
    for number, prompt in enumerate(prompts):
        hits = [server.stats().counters.prefix_hits for server in servers]
        ask(gateway, "/v1/completions", {**COMPLETION, "prompt": prompt})
        grown = [server.stats().counters.prefix_hits - before for server, before in zip(servers, hits, strict=True)]
        assert grown[number % 2] > 0
        assert grown[1 - number % 2] == 0
    with gateway.client() as client:
        client.post("/flush_cache").raise_for_status()
    for server in servers:
        until(functools.partial(knows_none, gateway, server), "the gateway has forgotten the pages")


def knows_all(gateway: Smg, server: Server) -> bool:
    held = server.stats().gauges.pages_cached
    return held >= 8 and gateway.blocks(server) == held


def knows_none(gateway: Smg, server: Server) -> bool:
    return gateway.blocks(server) == 0


def test_client_gone(pair: tuple[Server, Smg]) -> None:
    """Red if a request runs on for a client of the gateway that has left."""
    server, gateway = pair
    with gateway.client() as client, client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as got:
        lines = got.iter_lines()  # the response is closed with it
        next(lines)
        assert open_sequences(server) == 1
    until(server.idle, "the request was aborted")


def test_taken_port(tmp_path: Path, pair: tuple[Server, Smg]) -> None:
    """Red if two servers share a VllmEngine port: a gateway's calls would go to either."""
    server, _ = pair
    port = server.vllm.rpartition(":")[2]
    log = tmp_path / "serve.log"
    with pytest.raises(ServeError):
        Server(log, "--device=fake", f"--vllm-grpc-port={port}")
    assert "error: --vllm-grpc-port" in log.read_text()


def test_off_unless_asked_for(make_server: MakeServer) -> None:
    """Red if a listener without TLS and tokens is opened that nobody asked for."""
    server = make_server("--device=fake")
    assert "vllm" not in server.ready
    assert httpx.get(f"{server.http}/health", trust_env=False).is_success
