"""What clients must not send, sent to a live server over HTTP and gRPC: each refusal names its reason, and the server
answers afterwards."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from greenlane.text.v1 import text_pb2

from tests.e2e.conftest import MakeServer
from tests.e2e.harness import GUARD_S, Server, long_request, text_stub, until

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def still_serves(server: Server) -> Iterator[None]:
    """After every case: the processes are the same, nothing is left running, and an answer comes."""
    before = server.tree()
    yield
    assert server.complete().json()["usage"]["completion_tokens"] == 4
    until(server.idle, "nothing left running")
    assert server.tree() == before


def http_socket(server: Server) -> socket.socket:
    host, _, port = server.http.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), GUARD_S)


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": [1] * 5000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 3000}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 10**20}, "seed"),
    ({"seed": "100"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [9999]}, "stop_token_ids"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"logit_bias": {"one": 1}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("fields", "named"), BAD_FIELDS, ids=[json.dumps(each)[:40] for each, _ in BAD_FIELDS])
def test_bad_fields_over_http(server: Server, fields: dict[str, Any], named: str) -> None:
    """Red if a value out of range or of a wrong type is served, crashes something, or is refused without its name."""
    response = server.complete(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert named in f"{error['param']} {error['message']}"


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_large_seeds_are_served(server: Server, seed: int) -> None:
    """Red if a seed that fits 64 bits overflows somewhere."""
    assert server.complete(seed=seed, temperature=1).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'"text"', 400),
        (b'{"model": "tiny", "prompt": "\xff"}', 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400),
        (b'{"model": "tiny", "prompt": "x", "temperature": Infinity}', 400),
        (b'{"model": "tiny", "prompt": "x", "temperature": 1e999}', 400),
        (b"[" * 100_000, 400),
        (b'{"model": "other", "prompt": "x"}', 404),
    ],
)
def test_bad_bodies_over_http(server: Server, body: bytes, status: int) -> None:
    """Red if a malformed body gives anything else than an OpenAI-shaped error."""
    with server.client() as client:
        response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_huge_body_is_refused_before_it_is_read(server: Server) -> None:
    """Red if 100 MB are awaited before they are refused: none of them is sent here."""
    with http_socket(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_endless_chunked_body_is_cut(server: Server) -> None:
    """Red if a body without a stated length is read for as long as it comes."""
    sent = 0
    with http_socket(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while sent < 100 << 20:
                connection.sendall(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
                sent += 1 << 20
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert sent < 80 << 20


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)])
def test_wrong_paths_and_methods(server: Server, method: str, path: str, status: int) -> None:
    with server.client() as client:
        response = client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


INVALID = grpc.StatusCode.INVALID_ARGUMENT
BAD_SAMPLING: list[tuple[text_pb2.Sampling, str]] = [
    (text_pb2.Sampling(temperature=float("nan")), "temperature"),
    (text_pb2.Sampling(top_p=float("inf")), "top_p"),
    (text_pb2.Sampling(top_k=-7), "top_k"),
    (text_pb2.Sampling(min_p=-1.0), "min_p"),
    (text_pb2.Sampling(repetition_penalty=0.0), "repetition_penalty"),
    (text_pb2.Sampling(presence_penalty=9.0), "presence_penalty"),
    (text_pb2.Sampling(max_tokens=0), "max_tokens"),
    (text_pb2.Sampling(n=0), "n"),
    (text_pb2.Sampling(logprobs=21), "logprobs"),
    (text_pb2.Sampling(prompt_logprobs=21), "prompt_logprobs"),
    (text_pb2.Sampling(stop=["x" * 257]), "stop"),
    (text_pb2.Sampling(stop_token_ids=[-5]), "stop_token_ids"),
    (text_pb2.Sampling(logit_bias={5: float("nan")}), "logit_bias"),
]
BAD_REQUESTS: list[tuple[text_pb2.GenerateRequest, grpc.StatusCode, str]] = [
    (text_pb2.GenerateRequest(), INVALID, ""),
    (text_pb2.GenerateRequest(prompt=""), INVALID, "prompt"),
    (text_pb2.GenerateRequest(prompt_ids=text_pb2.TokenIds(ids=[4096])), INVALID, "vocabulary"),
    (text_pb2.GenerateRequest(prompt_ids=text_pb2.TokenIds(ids=[-1])), INVALID, "vocabulary"),
    (text_pb2.GenerateRequest(prompt="x", model="other"), grpc.StatusCode.NOT_FOUND, "other"),
    *((text_pb2.GenerateRequest(prompt="x", sampling=each), INVALID, named) for each, named in BAD_SAMPLING),
]


@pytest.mark.parametrize(
    ("request_", "code", "named"), BAD_REQUESTS, ids=[str(each)[:40] for each, _, _ in BAD_REQUESTS]
)
def test_bad_requests_over_grpc(
    server: Server, request_: text_pb2.GenerateRequest, code: grpc.StatusCode, named: str
) -> None:
    """Red if the text service lets through what the HTTP API refuses."""
    with text_stub(server.grpc) as stub, pytest.raises(grpc.RpcError) as failure:
        list(stub.Generate(request_, timeout=GUARD_S))
    assert failure.value.code() is code
    assert named in (failure.value.details() or "")


def test_deadline_passes_mid_stream(server: Server) -> None:
    """Red if a call outlives its deadline, or its request goes on in the engine."""
    with text_stub(server.grpc) as stub, pytest.raises(grpc.RpcError) as failure:
        list(stub.Generate(long_request(), timeout=0.5))
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_client_gone_mid_stream_over_grpc(server: Server) -> None:
    """Red if the engine goes on for a client that left (`still_serves` waits for idle)."""
    with text_stub(server.grpc) as stub:
        call = stub.Generate(long_request())
        next(call)
        call.cancel()


@pytest.mark.parametrize("stream", [True, False])
def test_client_gone_mid_stream_over_http(server: Server, stream: bool) -> None:
    """Red if closing the connection doesn't abort the request, streamed or not."""
    body = {"model": "tiny", "prompt": "It is", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    aborted = server.stats().counters.finished_abort
    with http_socket(server) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + text)
        until(lambda: server.stats().gauges.running, "the request runs")
    until(lambda: server.stats().counters.finished_abort == aborted + 1, "the request was aborted")


def test_abandoned_sequences_all_end(server: Server) -> None:
    """Red if aborting a request with n > 1 leaves one of its sequences running."""
    request = long_request()
    request.sampling.n = 4
    aborted = server.stats().counters.finished_abort
    with text_stub(server.grpc) as stub:
        call = stub.Generate(request)
        next(call)
        call.cancel()
    until(lambda: server.stats().counters.finished_abort == aborted + 4, "all four sequences were aborted")


def test_a_context_that_is_cut_is_said_to_be(make_server: MakeServer) -> None:
    """Red when a KV cache too small for the model's context shortens it without a word, or a large one is complained
    of: 6 layers of 2 x 2 heads of 64 float32 are 6 KiB a token."""
    cut = make_server("--device=cpu", "--threads=1", "--kv-cache-memory=1536KiB")
    assert cut.ready["info"]["max_model_len"] < 2048
    assert '"context_cut"' in cut.logged()
    assert "raise --kv-cache-memory" in cut.logged()
    assert '"context_cut"' not in make_server("--device=cpu", "--threads=1", "--kv-cache-memory=64MiB").logged()
