"""A person's conversation with a running server, over the text gRPC service.

Owns the terminal side of `greenlane chat` and `greenlane complete`: history, streaming to stdout, stopping an answer,
the figures of `--stats`. Knows nothing of models or tokens; whatever the server refuses is shown with its reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TextIO

import grpc
from greenlane.text.v1 import text_pb2, text_pb2_grpc

from access.keys import KeyFile
from access.policy import AccessError, check_in_the_clear
from access.tls import channel_credentials

MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
)
FAILED, USAGE = 1, 2
UNRESOLVED = "resolving"
"""In what gRPC says of an address that it can't make one of."""
REACHED_S = 10.0
"""For a server to answer before a conversation begins."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What the person chose; None leaves it to the model."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def message(self) -> text_pb2.Sampling:
        """Raises ValueError for a number that the wire can't carry."""
        chosen = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return text_pb2.Sampling(**chosen)


@dataclass(slots=True)
class Answer:
    """One streamed answer and its figures. Times in seconds."""

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    finish_reason: str = ""
    stopped: bool = False
    """The person stopped it."""

    def figures(self) -> str:
        """Time to first token, tokens per second after it, token counts."""
        if self.first_token_s is None:
            return "no token came"
        parts = [f"first token after {1000 * self.first_token_s:.0f} ms"]
        if self.tokens > 1 and self.total_s > self.first_token_s:
            parts.append(f"{(self.tokens - 1) / (self.total_s - self.first_token_s):.1f} tokens/s")
        if self.prompt_tokens:  # told at the end of an answer, which a stopped one hasn't got
            parts.append(f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached)")
        parts.append(f"{self.tokens} output tokens")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server is, and what it takes to get in. File names; `ca_certs` given: speak TLS."""

    address: str
    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    api_key_file: str | None = None

    def channel(self) -> grpc.Channel:
        """Raises AccessError for files that can't be read, and for a key that would travel in the clear."""
        if self.ca_certs is None:
            if self.api_key_file is not None:
                check_in_the_clear("--api-key-file", self.address, "--ssl-ca-certs makes it TLS")
            channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        else:
            credentials = channel_credentials("--ssl", self.ca_certs, self.certfile, self.keyfile)
            channel = grpc.secure_channel(self.address, credentials, options=CHANNEL_OPTIONS)
        if self.api_key_file is None:
            return channel
        return grpc.intercept_channel(channel, _WithKey(KeyFile("--api-key-file", self.api_key_file).bearer()))


class _WithKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """Sends a key with every call."""

    def __init__(self, bearer: str) -> None:
        self._metadata = (("authorization", bearer),)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(client_call_details._replace(metadata=self._metadata), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(client_call_details._replace(metadata=self._metadata), request)


@dataclass(slots=True)
class ChatSession:
    """The messages so far; grows with every finished or stopped answer."""

    server: Server
    sampling: SamplingOptions = SamplingOptions()
    system: str | None = None
    messages: list[text_pb2.Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system is not None:
            self.messages.append(text_pb2.Message(role="system", content=self.system))

    def ask(self, stub: text_pb2_grpc.TextStub, question: str, out: TextIO) -> Answer:
        """Stream the answer to `out`. Raises grpc.RpcError; the question then leaves no trace in the history."""
        asked = text_pb2.Message(role="user", content=question)
        request = text_pb2.GenerateRequest(
            chat=text_pb2.Chat(messages=[*self.messages, asked]), sampling=self.sampling.message()
        )
        answer = stream_answer(stub, request, out)
        self.messages += [asked, text_pb2.Message(role="assistant", content=answer.text)]
        return answer


def stream_answer(
    stub: text_pb2_grpc.TextStub,
    request: text_pb2.GenerateRequest,
    out: TextIO,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Write the text as it comes. Ctrl-C cancels the request and keeps what came. Raises grpc.RpcError."""
    answer, began = Answer(), clock()
    call = stub.Generate(request)
    try:
        for response in call:
            _take(answer, response, out, clock() - began)
    except KeyboardInterrupt:
        call.cancel()
        answer.stopped = True
    answer.total_s = clock() - began
    return answer


def _take(answer: Answer, response: text_pb2.GenerateResponse, out: TextIO, now: float) -> None:
    for delta in response.deltas:
        if delta.token_ids and answer.first_token_s is None:
            answer.first_token_s = now
        answer.tokens += len(delta.token_ids)
        answer.text += delta.text
        answer.finish_reason = delta.finish_reason or answer.finish_reason
        out.write(delta.text)
        out.flush()
    if response.HasField("usage"):
        answer.prompt_tokens = response.usage.prompt_tokens
        answer.cached_tokens = response.usage.cached_tokens
        answer.tokens = response.usage.completion_tokens


# ------------------------------ commands


def complete_text(server: Server, prompt: str, sampling: SamplingOptions, *, show_stats: bool) -> int:
    """Print the continuation; the exit status."""

    def run(stub: text_pb2_grpc.TextStub) -> int:
        request = text_pb2.GenerateRequest(prompt=prompt, sampling=sampling.message())
        return _end_answer(stream_answer(stub, request, sys.stdout), show_stats=show_stats)

    return _with_server(server, run)


def hold_conversation(session: ChatSession, question: str | None, *, show_stats: bool) -> int:
    """One question, or a conversation from stdin until its end; the exit status."""

    def run(stub: text_pb2_grpc.TextStub) -> int:
        if question is not None:
            return _end_answer(session.ask(stub, question, sys.stdout), show_stats=show_stats)
        lines: Iterable[str] = sys.stdin
        if sys.stdin.isatty():
            stub.ListModels(text_pb2.ListModelsRequest(), timeout=REACHED_S)  # who isn't there, says so before a prompt
            lines = _typed_lines()
        return _converse(stub, session, lines, show_stats=show_stats)

    return _with_server(session.server, run)


def _converse(stub: text_pb2_grpc.TextStub, session: ChatSession, lines: Iterable[str], *, show_stats: bool) -> int:
    """Answer every line. A refused message is reported and the conversation goes on; the last status counts."""
    status = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            status = _end_answer(session.ask(stub, line.rstrip("\n"), sys.stdout), show_stats=show_stats)
        except grpc.RpcError as error:
            status = _report(session.server, error)
    return status


def _typed_lines() -> Iterable[str]:
    """What a person types, until Ctrl-D, or Ctrl-C at an empty prompt."""
    import readline

    readline.set_auto_history(True)
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return


def _end_answer(answer: Answer, *, show_stats: bool) -> int:
    sys.stdout.write("\n")
    sys.stdout.flush()
    if answer.stopped:
        sys.stderr.write("(stopped)\n")
    elif answer.finish_reason == "length":
        sys.stderr.write("(cut off at the length limit)\n")
    if show_stats:
        sys.stderr.write(f"{answer.figures()}\n")
    return 0


def _with_server(server: Server, run: Callable[[text_pb2_grpc.TextStub], int]) -> int:
    try:
        with server.channel() as channel:
            return run(text_pb2_grpc.TextStub(channel))
    except grpc.RpcError as error:
        return _report(server, error)
    except (ValueError, AccessError) as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE


def _report(server: Server, error: grpc.RpcError) -> int:
    """The status and its reason; for a server that isn't reached, what to do."""
    code, details = error.code(), error.details() or ""
    sys.stderr.write(f"error: {code.name}: {details}\n")
    if code is grpc.StatusCode.UNAVAILABLE and ("failed to connect" in details or UNRESOLVED in details):
        sys.stderr.write(f"{_remedy(server, details)}\n")
    elif code is grpc.StatusCode.UNAUTHENTICATED:
        sys.stderr.write("--api-key-file FILE sends the first key of a file\n")
    return FAILED


def _remedy(server: Server, details: str) -> str:
    """Closed at once, or a failed handshake: one side speaks TLS where the other doesn't."""
    if UNRESOLVED in details:
        return "--address takes HOST:PORT of the text gRPC port, without http://"
    if "Failed parsing HTTP/2" in details:
        return f"{server.address} speaks HTTP alone: --address takes the text gRPC address (--grpc-port, 50051)"
    if server.ca_certs is None and "Socket closed" in details:
        return f"if {server.address} speaks TLS, name who signed its certificate: --ssl-ca-certs FILE"
    if "Hostname Verification Check failed" in details:
        return f"the server's certificate doesn't name {server.address.rpartition(':')[0]}: use a name that is in it"
    if server.ca_certs is not None and "handshake failed" in details:
        return f"{server.address} speaks no TLS, or {server.ca_certs} didn't sign its certificate: see --ssl-ca-certs"
    return f"is a server running at {server.address}? `greenlane serve --model …` starts one"
