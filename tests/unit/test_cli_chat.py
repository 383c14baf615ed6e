"""`greenlane chat`, `complete` and `check` against a scripted text server in this process."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from greenlane.text.v1 import text_pb2, text_pb2_grpc
from typer.testing import CliRunner

from frontend import chat
from frontend.chat import Answer, ChatSession, SamplingOptions, Server, hold_conversation, stream_answer
from frontend.check import Finding, check_machine, print_findings
from frontend.cli import app
from tests.certificates import Authority, key_file

TINY = Path(__file__).resolve().parents[1] / "fixtures" / "tiny-qwen3-austen"
Script = Callable[[text_pb2.GenerateRequest, grpc.ServicerContext], Iterator[text_pb2.GenerateResponse]]


def delta(text: str, ids: list[int], finish: str | None = None) -> text_pb2.GenerateResponse:
    return text_pb2.GenerateResponse(deltas=[text_pb2.Delta(text=text, token_ids=ids, finish_reason=finish)])


def two_words(request: text_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[text_pb2.GenerateResponse]:
    yield delta("Good ", [1])
    yield delta("day.", [2, 3], "stop")
    yield text_pb2.GenerateResponse(usage=text_pb2.Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4))


class TextServer(text_pb2_grpc.TextServicer):
    """Keeps what was asked and answers by script."""

    def __init__(self) -> None:
        self.script: Script = two_words
        self.requests: list[text_pb2.GenerateRequest] = []
        self.asked_keys: list[str | bytes | None] = []

    def Generate(
        self, request: text_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[text_pb2.GenerateResponse]:
        self.requests.append(request)
        yield from self.script(request, context)

    def ListModels(
        self, request: text_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> text_pb2.ListModelsResponse:
        self.asked_keys.append(dict(context.invocation_metadata()).get("authorization"))
        return text_pb2.ListModelsResponse()


@pytest.fixture
def served() -> Iterator[tuple[TextServer, str]]:
    """A scripted server and its address."""
    service = TextServer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    text_pb2_grpc.add_TextServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait()


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    return result.exit_code, result.stdout, result.stderr


def test_one_question(served: tuple[TextServer, str]) -> None:
    """Red if `chat QUESTION` sends something else than that question, or loses part of the streamed answer."""
    service, address = served
    status, out, _ = run("chat", "How do you do?", "--address", address, "--system", "Be brief.", "--max-tokens", "9")
    assert (status, out) == (0, "Good day.\n")
    (request,) = service.requests
    assert [(each.role, each.content) for each in request.chat.messages] == [
        ("system", "Be brief."),
        ("user", "How do you do?"),
    ]
    assert request.sampling.max_tokens == 9
    assert not request.sampling.HasField("temperature")


def test_piped_conversation_has_history(served: tuple[TextServer, str]) -> None:
    """Red if a later message is sent without the earlier ones and their answers."""
    service, address = served
    status, out, _ = run("chat", "--address", address, stdin="one\n\ntwo\n")
    assert (status, out) == (0, "Good day.\nGood day.\n")
    assert [each.content for each in service.requests[1].chat.messages] == ["one", "Good day.", "two"]


def test_a_refused_message_leaves_no_trace(served: tuple[TextServer, str]) -> None:
    """Red if a failed question stays in the history, or ends the conversation."""
    service, address = served

    def refuse_bad(
        request: text_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[text_pb2.GenerateResponse]:
        if request.chat.messages[-1].content == "bad":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "temperature is 200")
        return two_words(request, context)

    service.script = refuse_bad
    status, _, err = run("chat", "--address", address, stdin="bad\ngood\n")
    assert status == 0
    assert "INVALID_ARGUMENT: temperature is 200" in err
    assert [each.content for each in service.requests[1].chat.messages] == ["good"]


def test_complete_and_its_figures(served: tuple[TextServer, str]) -> None:
    service, address = served
    status, out, err = run("complete", "-", "--address", address, "--stats", "--seed", "5", stdin="It was")
    assert (status, out) == (0, "Good day.\n")
    assert service.requests[0].prompt == "It was"
    assert service.requests[0].sampling.seed == 5
    assert "7 prompt tokens (4 cached), 3 output tokens" in err


def test_figures_count_tokens_after_the_first() -> None:
    """Red if tokens per second includes the first token, whose time is the prompt's."""
    answer = Answer(tokens=11, prompt_tokens=5, first_token_s=0.5, total_s=1.5)
    assert answer.figures() == "first token after 500 ms, 10.0 tokens/s, 5 prompt tokens (0 cached), 11 output tokens"
    assert Answer().figures() == "no token came"


def test_no_server_is_said_plainly() -> None:
    """Red if an absent server gives a traceback, or status 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        status, _, err = run("chat", "hello", "--address", f"127.0.0.1:{free.getsockname()[1]}")
    assert status == 1
    assert "UNAVAILABLE" in err
    assert "greenlane serve" in err


def test_values_that_the_wire_cannot_carry(served: tuple[TextServer, str]) -> None:
    status, _, err = run("complete", "x", "--address", served[1], "--max-tokens", "-1")
    assert status == 2
    assert "error:" in err


def test_ctrl_c_stops_the_answer_and_keeps_it(served: tuple[TextServer, str], request: pytest.FixtureRequest) -> None:
    """Red if Ctrl-C leaves the request running in the server, or throws the partial answer away."""
    service, address = served
    ended = futures.Future[bool]()
    out = io.StringIO()

    def endless(
        request: text_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[text_pb2.GenerateResponse]:
        context.add_callback(lambda: ended.set_result(True))
        yield delta("So", [1])
        while out.getvalue() != "So" and context.is_active():
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGINT)
        ended.result(timeout=60)

    service.script = endless
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a process of its own
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with grpc.insecure_channel(address) as channel:
        session = ChatSession(Server(address))
        answer = session.ask(text_pb2_grpc.TextStub(channel), "talk", out)
    assert answer.stopped
    assert ended.result(timeout=60)
    assert session.messages[-1].role == "assistant"


def test_streaming_writes_as_it_comes(served: tuple[TextServer, str]) -> None:
    """Red if the text is collected and written at the end."""
    service, address = served
    out = io.StringIO()

    def after_first_word_is_out(
        request: text_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[text_pb2.GenerateResponse]:
        yield delta("first", [1])
        while out.getvalue() != "first" and context.is_active():
            os.sched_yield()
        yield delta(" second", [2], "length")

    service.script = after_first_word_is_out
    with grpc.insecure_channel(address) as channel:
        request = text_pb2.GenerateRequest(prompt="x", sampling=SamplingOptions().message())
        answer = stream_answer(text_pb2_grpc.TextStub(channel), request, out)
    assert answer.text == out.getvalue() == "first second"
    assert answer.finish_reason == "length"


def test_a_guarded_server(tmp_path: Path) -> None:
    """Red if the key or the certificate that the person names isn't used, a refusal ends with status 0, or nobody says
    that one side speaks TLS where the other doesn't."""
    issued, keys = Authority(tmp_path).issue("server"), str(key_file(tmp_path, "the-key"))
    service = TextServer()
    seen: list[str] = []

    def answer(request: text_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[text_pb2.GenerateResponse]:
        seen.extend(str(value) for name, value in context.invocation_metadata() if name == "authorization")
        yield delta("in", [1], "stop")

    service.script = answer
    server = grpc.server(futures.ThreadPoolExecutor(2))
    text_pb2_grpc.add_TextServicer_to_server(service, server)
    pair = (issued.key.read_bytes(), issued.cert.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    plain = ("--address", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    to = ("--address", f"127.0.0.1:{port}")
    guards = ("--ssl-ca-certs", str(issued.ca), "--api-key-file", keys)
    assert run("chat", "hello", *to, *guards)[:2] == (0, "in\n")
    assert run("complete", "hello", *to, *guards)[:2] == (0, "in\n")
    assert seen == ["Bearer the-key"] * 2
    status, _, said = run("chat", "hello", *to)
    assert (status, "--ssl-ca-certs FILE" in said) == (1, True)
    other = Authority(tmp_path, "other").issue("another server")
    status, _, said = run("chat", "hello", *to, "--ssl-ca-certs", str(other.ca))
    assert (status, "didn't sign its certificate" in said) == (1, True)
    status, _, said = run("chat", "hello", *plain, "--ssl-ca-certs", str(issued.ca))
    assert (status, "speaks no TLS" in said) == (1, True)
    text = chat._remedy(Server("h:1"), "last error: UNAVAILABLE: Failed parsing HTTP/2 (Expected SETTINGS frame …)")
    assert "--grpc-port" in text
    assert "HOST:PORT" in chat._remedy(Server("http://h:1"), "errors resolving http://h:1: Misformatted domain name")
    text = chat._remedy(Server("h:1"), "failed to connect; last error: Hostname Verification Check failed.")
    assert "doesn't name h:" in text
    status, _, said = run("chat", "hello", *to, "--api-key-file", "/nowhere/keys")
    assert (status, "--api-key-file /nowhere/keys can't be read" in said) == (2, True)
    status, _, said = run("chat", "hello", "--address", "example.org:50051", "--api-key-file", keys)
    assert (status, "in the clear" in said) == (2, True)
    server.stop(None).wait()


# ------------------------------ check


def test_check_of_this_machine() -> None:
    """Red if a machine that runs these tests is called unfit, or a finding is missing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        findings = {each.what: each for each in check_machine(str(TINY), "cpu", (0, busy))}
    assert findings["Python"].fit
    assert findings["torch"].fit
    assert findings["model"] == Finding("model", True, f"{TINY}: Qwen3ForCausalLM, 0.01 GiB of weights")
    assert findings["tokenizer"].fit
    assert findings["port 0"].fit
    assert findings[f"port {busy}"].fit is False
    assert findings.keys() >= {"NVIDIA driver", "GPU", "lane modes"}
    pretended = {each.what: each.found for each in check_machine(None, "fake", ())}
    assert pretended["lane modes"].startswith("off, stream, green and auto")


def test_check_names_what_is_unfit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if an unfit machine gets exit status 0, or the reason is lost."""
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    findings = check_machine(str(tmp_path), "cpu", ())
    assert print_findings(findings, as_json=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["fit"] is False
    (model,) = [each for each in printed["findings"] if each["what"] == "model"]
    assert "GPT2LMHeadModel" in model["found"]
    assert print_findings(findings, as_json=False) == 1
    assert "not fit to serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "keep", "what", "found"),
    [
        ("model.safetensors", 1000, "model", "claims"),
        ("model.safetensors", None, "model", "safetensors"),
        ("tokenizer.json", 1, "tokenizer", "tokenizer.json"),
        ("tokenizer.json", None, "tokenizer", "tokenizer.json"),
    ],
)
def test_check_looks_into_the_folder(tmp_path: Path, file: str, keep: int | None, what: str, found: str) -> None:
    """Red if a folder whose weights or tokenizer `serve` would refuse is called fit."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    if keep is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes((folder / file).read_bytes()[:keep])
    findings = {each.what: each for each in check_machine(str(folder), "cpu", ())}
    assert findings[what].fit is False
    assert found in findings[what].found


class Terminal(io.StringIO):
    """A standard input that a person types into."""

    def isatty(self) -> bool:
        return True


def test_a_conversation_without_a_server_ends_before_it_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red if a person types a question before hearing that nobody is there to answer it."""
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(chat, "_typed_lines", lambda: pytest.fail("a prompt was shown"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        assert hold_conversation(ChatSession(Server(address)), None, show_stats=False) == 1
    assert f"is a server running at {address}?" in capsys.readouterr().err


def test_a_conversation_begins_when_the_server_answers(
    served: tuple[TextServer, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red if the question whether somebody is there keeps a person from a server that is, or comes without the key."""
    service, address = served
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(chat, "_typed_lines", lambda: iter(["How do you do?"]))
    keys = key_file(tmp_path, "k" * 32)
    session = ChatSession(Server(address, api_key_file=str(keys)))
    assert hold_conversation(session, None, show_stats=False) == 0
    assert capsys.readouterr().out == "Good day.\n"
    assert service.asked_keys == [f"Bearer {'k' * 32}"]
