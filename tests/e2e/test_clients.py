"""Conversations with a running server through every client that the README names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from scripts.serving import GREENLANE
from tests.e2e.harness import GUARD_S, ROOT, Server, until

pytestmark = pytest.mark.e2e

QUESTION = "What is a whale?"
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 12,
    "temperature": 0,
}


def grpcurl_result(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("grpcurl")
    return subprocess.run([program, "-plaintext", *arguments], capture_output=True, text=True, timeout=GUARD_S)


def grpcurl(*arguments: str) -> str:
    result = grpcurl_result(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def greenlane(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GREENLANE, *arguments], input=stdin, capture_output=True, text=True, timeout=GUARD_S)


@pytest.fixture(scope="module")
def answer(server: Server) -> str:
    """What the model says to QUESTION, greedily, over plain HTTP without streaming."""
    with server.client() as client:
        body = client.post("/v1/chat/completions", json=ASK).raise_for_status().json()
    assert body["usage"]["completion_tokens"] == 12
    text: str = body["choices"][0]["message"]["content"]
    assert text.strip()
    return text


def test_openai_package(server: Server, answer: str) -> None:
    """Red if the OpenAI SDK can't stream a chat or a completion, or reads another text than plain HTTP gives."""
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        whole = client.completions.create(model="tiny", prompt="It is a truth", max_tokens=8, temperature=0, n=2)
        assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
        assert whole.choices[0].text == whole.choices[1].text != ""


def test_grpcurl_streams_over_reflection(server: Server, answer: str) -> None:
    """Red if a generic client, which knows the contracts by reflection alone, can't hold a streamed conversation."""
    request = {
        "chat": {"messages": [{"role": "user", "content": QUESTION}]},
        "sampling": {"max_tokens": 12, "temperature": 0},
    }
    out = grpcurl("-d", json.dumps(request), server.grpc, "greenlane.text.v1.Text/Generate")
    messages = [json.loads(part) for part in re.split(r"(?<=\n})\n", out) if part.strip()]
    assert len(messages) > 2, "the answer came in one piece"
    assert "".join(delta.get("text", "") for message in messages for delta in message.get("deltas", [])) == answer
    assert messages[-1]["usage"]["completion_tokens"] == 12


def test_grpcurl_shows_rich_errors(server: Server) -> None:
    """Red if a person at a terminal isn't shown which field was wrong."""
    request = json.dumps({"text": "It is a truth", "sampling_params": {"regex": "a("}})
    result = grpcurl_result("-d", request, server.vllm, "vllm.grpc.engine.VllmEngine/Generate")
    assert result.returncode != 0
    assert '"reason":"GRAMMAR"' in result.stderr
    assert '"field":"regex"' in result.stderr


def test_grpc_requests(server: Server, answer: str) -> None:
    """Red if a client that learns the contract by reflection in Python can't stream, or can't read a refusal."""
    source = """
import json, sys, grpc, grpc_requests
client = grpc_requests.Client.get_by_endpoint(sys.argv[1], channel_options=[("grpc.enable_http_proxy", 0)])
text = client.service("greenlane.text.v1.Text")
chat = {"messages": [{"role": "user", "content": sys.argv[2]}]}
answers = text.Generate({"chat": chat, "sampling": {"max_tokens": 12, "temperature": 0}})
print(json.dumps([delta["text"] for answer in answers for delta in answer.get("deltas", [])]))
try:
    list(text.Generate({"prompt": "a", "sampling": {"temperature": 900}}))
except grpc.RpcError as error:
    print(error.code().name)
"""
    result = subprocess.run(
        [sys.executable, "-c", source, server.grpc, QUESTION], capture_output=True, text=True, timeout=GUARD_S
    )
    assert result.returncode == 0, result.stderr
    texts, refused = result.stdout.splitlines()
    assert "".join(json.loads(texts)) == answer
    assert len(json.loads(texts)) > 2
    assert refused == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("attribute", "service"),
    [
        ("grpc", "greenlane.text.v1.Text"),
        ("engine", "greenlane.engine.v1.Engine"),
        ("vllm", "vllm.grpc.engine.VllmEngine"),
    ],
)
def test_every_grpc_server_has_health_and_reflection(server: Server, attribute: str, service: str) -> None:
    """Red if one of the gRPC servers lacks a service that operators rely on."""
    address = getattr(server, attribute)
    address = f"unix://{address.removeprefix('unix:')}" if address.startswith("unix:") else address
    flags = ("-unix", address.removeprefix("unix://")) if address.startswith("unix:") else (address,)
    assert service in grpcurl(*flags, "list").splitlines()
    assert json.loads(grpcurl(*flags, "grpc.health.v1.Health/Check")) == {"status": "SERVING"}


def test_readme_client(server: Server) -> None:
    """Red if the README's Python client doesn't run as it stands there."""
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", source, server.grpc], capture_output=True, text=True, timeout=GUARD_S, cwd="/"
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"\S[\s\S]*\n\d+ tokens\n$", result.stdout)


def test_greenlane_chat(server: Server, answer: str) -> None:
    """Red if the terminal client shows another answer, or its second message lacks the first one's history."""
    flags = ("--address", server.grpc, "--max-tokens", "12", "--temperature", "0")
    once = greenlane("chat", QUESTION, *flags)
    assert (once.returncode, once.stdout) == (0, f"{answer}\n"), once.stderr
    twice = greenlane("chat", *flags, "--stats", stdin=f"{QUESTION}\n{QUESTION}\n")
    assert twice.returncode == 0
    assert twice.stdout.startswith(f"{answer}\n")
    prompts = [int(count) for count in re.findall(r"(\d+) prompt tokens", twice.stderr)]
    assert prompts[1] > prompts[0] + 12


def test_greenlane_complete(server: Server) -> None:
    result = greenlane("complete", "It is a truth", "--address", server.grpc, "--max-tokens", "6", "--temperature", "0")
    expected = server.complete(max_tokens=6).json()["choices"][0]["text"]
    assert (result.returncode, result.stdout) == (0, f"{expected}\n")


def test_metrics_and_status_pages(server: Server) -> None:
    """Red if gauges are stale, or the page that a person sees first is missing."""
    until(server.idle, "idle")
    with server.client() as client:
        metrics = client.get("/metrics").raise_for_status().text
        assert re.search(r"^greenlane_\w*running\w*(\{.*\})? 0(\.0)?$", metrics, re.MULTILINE)
        assert "text/html" in client.get("/").raise_for_status().headers["content-type"]
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
