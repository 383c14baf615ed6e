"""The text gRPC service on a real server: answers, statuses, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from greenlane.text.v1 import text_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from frontend import listeners, serving
from frontend.config import ConfigError
from frontend.request import ApiError, Code, Delta, Sampling, TokenLogprob, TopLogprob
from frontend.text_service import SERVICE, TextService
from tests.unit.rich_errors import named_field, reason, retry_ms
from tests.unit.scripted_answers import HANG_GUARD_S, Site, gated, until, words
from tests.unit.text_front import Front, failed, text_front

CANARY = "the-canary-sang-at-dawn"


@pytest_asyncio.fixture
async def front() -> AsyncIterator[Front]:
    async with text_front(Site()) as front:
        yield front


async def test_answer(front: Front) -> None:
    """Red if an answer loses deltas, its id, its usage, or sends the usage before the end."""
    site = front.site
    site.script.steps = [
        [Delta(0, "a", [1]), Delta(0, "b", [2]), Delta(1, "x", [3])],
        [Delta(0, "c", [4], finish_reason="stop", stop_reason=42), Delta(1, "y", [5], finish_reason="length")],
    ]
    first, second, last = [m async for m in front.generate(prompt="Emma", sampling=pb.Sampling(n=2))]
    assert [(d.index, d.text, list(d.token_ids)) for d in first.deltas] == [(0, "ab", [1, 2]), (1, "x", [3])]
    assert [(d.finish_reason, d.stop_reason) for d in second.deltas] == [("stop", "42"), ("length", "")]
    assert not second.deltas[1].HasField("stop_reason")
    assert (first.HasField("usage"), last.usage.completion_tokens, last.usage.cached_tokens) == (False, 5, 3)
    assert {m.request_id for m in (first, second, last)} == {"made-id"}
    assert site.tokenizer.decode(site.script.request.prompt_ids) == "Emma"


async def test_every_sampling_field_arrives(front: Front) -> None:
    """Red if a field is lost, lands in another one, or an absent one becomes zero."""
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 2**64 - 1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "logit_bias": {5: -100.0},
        "max_tokens": 9,
        "min_tokens": 3,
        "stop_token_ids": (4, 6),
        "ignore_eos": True,
        "n": 1,
        "logprobs": 4,
        "prompt_logprobs": 1,
    }
    sampling = pb.Sampling(**fields, stop=["END"], include_stop=True)
    request: dict[str, Any] = {
        "priority": -2,
        "cache_salt": "tenant",
        "skip_special_tokens": False,
        "request_id": "mine",
    }
    async for _ in front.generate(prompt="x", sampling=sampling, **request):
        pass
    asked = front.site.script.request
    assert asked.sampling == Sampling(**fields)
    assert (asked.stop, asked.include_stop, asked.priority, asked.cache_salt) == (("END",), True, -2, "tenant")
    assert (asked.skip_special_tokens, asked.label) == (False, "mine")
    assert asked.deadline_s is not None
    assert HANG_GUARD_S - 30 < asked.deadline_s < HANG_GUARD_S + 30
    async for _ in front.text.Generate(pb.GenerateRequest(prompt="x")):
        pass
    asked = front.site.script.request
    assert (asked.sampling, asked.deadline_s, asked.skip_special_tokens) == (Sampling(), None, True)


async def test_inputs(front: Front) -> None:
    """Red if a chat isn't rendered by the template, ids are retokenized, or echo misses the prompt's text."""
    chat = pb.Chat(messages=[pb.Message(role="user", content="hi")])
    first, *_ = [m async for m in front.generate(chat=chat)]
    decode = front.site.tokenizer.decode
    ids = front.site.script.request.prompt_ids
    assert decode(ids, False) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    emma = front.site.tokenizer.encode_inline("Emma")
    first, second, _ = [m async for m in front.generate(prompt_ids=pb.TokenIds(ids=emma), echo=True)]
    assert front.site.script.request.prompt_ids == emma
    assert (first.deltas[0].text, second.deltas[0].text) == ("EmmaHello", " world")
    chat.add_generation_prompt = False
    async for _ in front.generate(chat=chat):
        pass
    assert decode(front.site.script.request.prompt_ids, False) == "<|im_start|>user\nhi<|im_end|>\n"


async def test_logprobs(front: Front) -> None:
    """Red if logprobs lose a field, or the prompt's come more or less than once."""
    top = TopLogprob(8, "It", -1.5)
    entry = TokenLogprob(7, "He", -0.5, 2, (top,))
    front.site.script.prompt_logprobs = [TokenLogprob(1, "E", None, None), entry]
    front.site.script.steps = [[Delta(0, "He", [7], [entry])], *words("!")]
    sampling = pb.Sampling(logprobs=1, prompt_logprobs=1)
    first, second, _ = [m async for m in front.generate(prompt="x", sampling=sampling)]
    expected = pb.TokenLogprob(
        id=7, token="He", logprob=-0.5, rank=2, top=[pb.TopLogprob(id=8, token="It", logprob=-1.5)]
    )
    assert [*first.prompt_logprobs] == [pb.TokenLogprob(id=1, token="E"), expected]
    assert [*first.deltas[0].logprobs] == [expected]
    assert [*second.prompt_logprobs] == []


@pytest.mark.parametrize(
    ("fields", "code", "parameter"),
    [
        ({}, Code.INVALID_ARGUMENT, "input"),
        ({"model": "gpt", "prompt": "x"}, Code.NOT_FOUND, "model"),
        ({"prompt": "x", "sampling": pb.Sampling(n=0)}, Code.INVALID_ARGUMENT, "n"),
        ({"prompt": "x", "sampling": pb.Sampling(n=129)}, Code.INVALID_ARGUMENT, "n"),
        ({"prompt": "x", "cache_salt": "s" * 257}, Code.INVALID_ARGUMENT, "cache_salt"),
        ({"chat": pb.Chat()}, Code.INVALID_ARGUMENT, "messages"),
        ({"chat": pb.Chat(messages=[pb.Message()] * 65537)}, Code.INVALID_ARGUMENT, "messages"),
        ({"prompt": "x", "sampling": pb.Sampling(stop_token_ids=[1] * 129)}, Code.INVALID_ARGUMENT, "stop_token_ids"),
        (
            {"prompt": "x", "sampling": pb.Sampling(logit_bias=dict.fromkeys(range(1025), 0.5))},
            Code.INVALID_ARGUMENT,
            "logit_bias",
        ),
        (
            {"chat": pb.Chat(messages=[pb.Message(role="user")], template_kwargs_json="[1]")},
            Code.INVALID_ARGUMENT,
            "template_kwargs_json",
        ),
        (
            {"chat": pb.Chat(messages=[pb.Message(role="user")], template_kwargs_json='{"messages": 1}')},
            Code.INVALID_ARGUMENT,
            "chat_template_kwargs",
        ),
    ],
)
async def test_refused_here(front: Front, fields: dict[str, Any], code: Code, parameter: str | None) -> None:
    """Red if a request that can't be served reaches the engine core, or its status names nothing."""
    error = await failed(front.generate(**fields))
    assert error.code().value[0] == code
    assert named_field(error) == parameter
    assert front.site.script.answers == []


async def test_ids_are_counted_before_they_are_looked_at(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a list of ids is searched on the event loop whatever its length: 30 million of them took longer than a
    frontend may be silent, and cost it its life."""
    monkeypatch.setattr(serving, "MAX_DECODED_IDS", 4)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await front.text.Detokenize(pb.DetokenizeRequest(ids=[9999] * 5), timeout=HANG_GUARD_S)
    assert (refused.value.code(), named_field(refused.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "ids")
    assert refused.value.details() == "ids has 5 entries; at most 4 are allowed"


async def test_refused_by_the_engine(front: Front) -> None:
    """Red if a refusal loses its code, text or time to wait, or initial metadata is sent before it."""
    front.site.script.refusal = ApiError(
        Code.RESOURCE_EXHAUSTED, "the queue is full", retry_after_s=1.5, reason="QUEUE_FULL"
    )
    call = front.generate(prompt="x")
    error = await failed(call)
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    assert (reason(error), retry_ms(error), named_field(error)) == ("QUEUE_FULL", 1500, None)
    status = await rpc_status.aio.from_call(call)  # type: ignore[attr-defined]  # as the clients' library reads it
    assert (status.code, len(status.details)) == (Code.RESOURCE_EXHAUSTED, 2)
    assert front.site.script.answers[0].closed == 1


async def test_no_metadata_before_acceptance(front: Front) -> None:
    """Red if a client is told that its call goes well while the engine core may still refuse it."""
    front.site.script.gated_acceptance = True
    call = front.generate(prompt="x")
    metadata = asyncio.ensure_future(call.initial_metadata())
    await until(lambda: len(front.site.script.answers) == 1)
    await asyncio.sleep(0.05)
    assert not metadata.done()
    front.site.script.answers[0].release()
    await metadata
    call.cancel()


async def test_failure_after_tokens(front: Front) -> None:
    """Red if what came before a failure is lost, or the failure is."""
    front.site.script.steps = [*words("a", "b")[:1], ApiError(Code.UNAVAILABLE, "the engine core was lost")]
    texts: list[str] = []
    error = await failed(front.generate(prompt="x"), texts)
    assert (texts, error.code()) == (["a"], grpc.StatusCode.UNAVAILABLE)


async def test_unexpected_error(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    """Red if an error that nobody foresaw shows its text, to the client or in the log."""
    front.site.script.surprise = ValueError(CANARY)
    with caplog.at_level(logging.DEBUG):
        error = await failed(front.generate(prompt=CANARY))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert CANARY not in str(error)
    assert CANARY not in caplog.text


@pytest.mark.parametrize("moment", ["queued", "silent", "streaming"])
async def test_cancelled(front: Front, moment: str) -> None:
    """Red if a call that its client cancelled leaves its request running."""
    front.site.script.gated_acceptance = moment == "queued"
    front.site.script.steps = [*words("a", "b")[:1], None] if moment == "streaming" else gated(words("a"))
    call = front.generate(prompt="x")
    reading = asyncio.ensure_future(call.read())
    if moment == "streaming":
        await reading
    await until(lambda: len(front.site.script.answers) == 1)
    call.cancel()
    await ended(front)


async def test_deadline(front: Front) -> None:
    """Red if a request outlives its call's deadline."""
    front.site.script.steps = [None]
    error = await failed(front.generate(prompt="x", timeout=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await ended(front)


async def test_slow_reader(front: Front) -> None:
    """Red if a client that reads nothing makes the frontend write on and on."""
    front.site.script.steps = [[Delta(0, "x" * 10_000, [1])] for _ in range(1000)]
    call = front.generate(prompt="x")
    await call.read()
    await asyncio.sleep(0.1)
    assert front.site.metrics.output_tokens < 1000
    call.cancel()
    await ended(front)


async def ended(front: Front) -> None:
    await until(lambda: front.site.metrics.open_requests == 0)
    assert [answer.closed for answer in front.site.script.answers] == [1]
    assert front.site.metrics._outcomes["cancelled"] == 1


async def test_tokens_and_models(front: Front) -> None:
    """Red if the small calls differ from what the HTTP API says."""
    tokens = await front.text.Tokenize(pb.TokenizeRequest(prompt="Emma Woodhouse"))
    assert tokens.max_model_len == 2048
    text = await front.text.Detokenize(pb.DetokenizeRequest(ids=tokens.ids))
    assert text.text == "Emma Woodhouse"
    models = await front.text.ListModels(pb.ListModelsRequest())
    assert [(model.id, model.max_model_len) for model in models.models] == [("austen", 2048), ("tiny/alias", 2048)]
    chat = pb.Chat(messages=[pb.Message(role="user", content="hi")])
    rendered = await front.text.Tokenize(pb.TokenizeRequest(chat=chat))
    assert front.site.tokenizer.decode([*rendered.ids], False).startswith("<|im_start|>user\nhi")
    for call in (
        front.text.Tokenize(pb.TokenizeRequest()),
        front.text.Detokenize(pb.DetokenizeRequest(ids=[-1])),
        front.text.Detokenize(pb.DetokenizeRequest(ids=[4096])),
        front.text.Tokenize(pb.TokenizeRequest(model="gpt", prompt="x")),
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_health(front: Front) -> None:
    """Red if a watcher isn't told a change before `tell` returns, or one that leaves takes others with it."""
    stub = health_pb2_grpc.HealthStub(front.channel)
    check: Callable[[str], Any] = lambda name: stub.Check(health_pb2.HealthCheckRequest(service=name))  # noqa: E731
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    watches = [stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE)) for _ in range(2)]
    assert [(await watch.read()).status for watch in watches] == [not_serving] * 2
    await front.health.tell(True)
    assert [(await watch.read()).status for watch in watches] == [serving] * 2
    assert {(await check(name)).status for name in ("", SERVICE)} == {serving}
    watches[0].cancel()
    await until(lambda: len(front.health._watchers) == 1)
    await front.health.tell(False)
    assert (await watches[1].read()).status == not_serving
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check("other.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="other.Service"))
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_port_taken(front: Front) -> None:
    """Red if two servers share one gRPC port, each getting half of the calls."""
    port = int(front.address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match="--grpc-port"):
        listeners.grpc_server("127.0.0.1", port, TextService(front.site.served, str), front.health, 1 << 20)


async def test_tokenize_is_bounded(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if text that no prompt may have is tokenized because nothing is generated from it."""
    longest = 2048 * front.site.tokenizer.longest_token
    monkeypatch.setattr(front.site.tokenizer, "encode_inline", lambda *_: [1])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.text.Tokenize(pb.TokenizeRequest(prompt="a" * (longest + 1)))
    assert (caught.value.code(), reason(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED")
