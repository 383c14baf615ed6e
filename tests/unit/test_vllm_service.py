"""VllmEngine on a real server over scripted answers: what requests mean, what answers hold, what the model is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from frontend import vllm_service
from frontend.config import Place
from frontend.request import ApiError, Code, Delta, Grammar, Sampling, TokenLogprob, TopLogprob
from tests.unit.rich_errors import named_field, reason, retry_ms
from tests.unit.scripted_answers import HANG_GUARD_S, Site, until, words
from tests.unit.scripted_engine import socket_folder
from tests.unit.vllm_front import Scripted, failed, fronting, scripted


@pytest_asyncio.fixture
async def front() -> AsyncIterator[Scripted]:
    async with scripted() as front:
        yield front


# ------------------------------ requests


async def test_every_sampling_field_arrives(front: Scripted) -> None:
    """Red if a field is lost or lands in another one."""
    fields: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "logit_bias": {5: -100.0},
        "max_tokens": 9,
        "min_tokens": 3,
        "stop_token_ids": (4, 6),
        "ignore_eos": True,
        "n": 2,
        "logprobs": 0,
        "prompt_logprobs": 1,
    }
    front.site.script.steps = [*words("a"), *words("b", index=1)]
    text = {"stop": ["END"], "include_stop_str_in_output": True, "skip_special_tokens": True}
    await front.answer(tokenized=pb.TokenizedInput(input_ids=[5, 6]), request_id="mine", seed=-1, **fields, **text)
    asked = front.site.script.request
    assert asked.sampling == Sampling(**fields, seed=2**64 - 1)
    assert (asked.prompt_ids, asked.label) == ([5, 6], "mine")
    assert (asked.stop, asked.include_stop, asked.skip_special_tokens) == (("END",), True, True)


async def test_zeros_are_unset(front: Scripted) -> None:
    """Red if a field without presence that nobody set overrides the model's default, top_p 0 before all."""
    await front.answer(text="Emma", timeout=None)
    asked = front.site.script.request
    assert (asked.sampling, asked.deadline_s, asked.stop) == (Sampling(), None, ())
    assert front.site.tokenizer.decode(asked.prompt_ids) == "Emma"
    await front.answer(text="Emma", timeout=30.0)
    deadline = front.site.script.request.deadline_s
    assert deadline is not None
    assert 0 < deadline < 60


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "input"),
        ({"choice": pb.ChoiceConstraint(choices=["a", ""])}, "choice"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
        ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
        ({"media_refs": pb.MediaRefs()}, "media_refs"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"n": 2**31}, "n"),
        ({"n": 129}, "n"),
    ],
)
async def test_refused_by_name(front: Scripted, fields: dict[str, Any], named: str) -> None:
    """Red if what isn't served is ignored (the client would take free text for JSON), or if answers are allocated for
    as many sequences as a client likes: 2^31 of them cost a frontend its life."""
    error = await failed(front.generate(**({"text": "x", **fields} if fields else {})))
    assert (error.code(), named_field(error), reason(error)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        named,
        "INVALID_ARGUMENT",
    )
    assert front.site.script.answers == []


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"json_object": True}, "json_schema", '{"type":"object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": "start: /a/"}, "lark", "start: /a/"),
        ({"structural_tag": "{}"}, "structural_tag", "{}"),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, "choice", '["a","b"]'),
    ],
)
async def test_constraints(front: Scripted, fields: dict[str, Any], kind: str, text: str) -> None:
    """Red if a constraint is left out, read as another kind, or an error of it wouldn't bear the contract's name."""
    await front.answer(text="x", **fields)
    assert front.site.script.request.grammar == Grammar(kind, text, next(iter(fields)))


async def test_what_cant_fit_costs_no_work(front: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a prompt longer than any that fits is tokenized or copied before it is refused."""
    longest = 2048 * front.site.tokenizer.longest_token
    monkeypatch.setattr(front.site.tokenizer, "encode_inline", lambda *_: [1])
    for fields in ({"text": "a" * (longest + 1)}, {"tokenized": pb.TokenizedInput(input_ids=[1] * 2049)}):
        error = await failed(front.generate(**fields))
        assert (error.code(), named_field(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
        assert reason(error) == "CONTEXT_EXCEEDED"
    assert front.site.script.answers == []
    await front.answer(text="a" * longest)
    await front.answer(tokenized=pb.TokenizedInput(input_ids=[1] * 2048))


async def test_absent_constraint(front: Scripted) -> None:
    """Red if `json_object: false` is taken for a constraint."""
    _, completions = await front.answer(text="x", json_object=False, data_parallel_rank=0)
    assert len(completions) == 1
    assert front.site.script.request.grammar is None


# ------------------------------ answers


def interleaved() -> list[list[Delta]]:
    return [
        [Delta(0, "a", [1]), Delta(0, "b", [2]), Delta(1, "x", [3])],
        [Delta(0, "c", [4], finish_reason="stop", stop_reason=42), Delta(1, "y", [5], finish_reason="length")],
    ]


async def test_stream(front: Scripted) -> None:
    """Red if a chunk repeats tokens or mixes sequences, or a sequence has no completion of its own at its end."""
    front.site.script.steps = interleaved()
    messages = [message async for message in front.generate(text="Emma", n=2)]
    kinds = [message.WhichOneof("response") for message in messages]
    assert kinds == ["chunk", "chunk", "chunk", "complete", "chunk", "complete"]
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    shown = [(chunk.index, [*chunk.token_ids], chunk.completion_tokens) for chunk in chunks]
    assert shown == [(0, [1, 2], 2), (1, [3], 1), (0, [4], 1), (1, [5], 1)]
    prompt = len(front.site.script.request.prompt_ids)
    assert {(chunk.prompt_tokens, chunk.cached_tokens) for chunk in chunks} == {(prompt, 3)}
    assert_completions([message.complete for message in messages if message.HasField("complete")], prompt)


async def test_without_stream(front: Scripted) -> None:
    """Red if a client that doesn't stream gets chunks, or a completion with less than everything."""
    front.site.script.steps = interleaved()
    chunks, completions = await front.answer(text="Emma", n=2, stream=False)
    assert chunks == []
    assert_completions(completions, len(front.site.script.request.prompt_ids))


def assert_completions(completions: list[Any], prompt_tokens: int) -> None:
    first, second = completions
    assert (first.index, [*first.output_ids], first.finish_reason) == (0, [1, 2, 4], "stop")
    assert (first.matched_token_id, first.completion_tokens, first.prompt_tokens) == (42, 3, prompt_tokens)
    assert (second.index, [*second.output_ids], second.finish_reason) == (1, [3, 5], "length")
    assert (second.WhichOneof("matched_stop"), second.cached_tokens) == (None, 3)


async def test_matched_stop_string(front: Scripted) -> None:
    """Red if the client isn't told which of its stop strings ended the answer."""
    front.site.script.steps = [[Delta(0, "a", [1], finish_reason="stop", stop_reason="END")]]
    _, (complete,) = await front.answer(text="x", stop=["END"])
    assert (complete.matched_stop_str, complete.finish_reason) == ("END", "stop")


@pytest.mark.parametrize("top", [0, 1])
@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs(front: Scripted, stream: bool, top: int) -> None:
    """Red if logprobs are lost, sent twice, or have alternatives that nobody asked for."""
    tops = (TopLogprob(8, "It", -1.5),) if top else ()
    entry = TokenLogprob(7, "He", -0.5, 2, tops)
    front.site.script.prompt_logprobs = [TokenLogprob(1, "E", None, None), entry]
    front.site.script.steps = [[Delta(0, "He", [7], [entry])], [Delta(0, "!", [9], [entry], "length")]]
    chunks, (complete,) = await front.answer(text="x", logprobs=top, prompt_logprobs=top, stream=stream)
    holders = [*chunks, complete]
    wanted = pb.TopLogProbs(values=[-1.5], token_ids=[8])
    outputs = [each.output_logprobs for each in holders if each.HasField("output_logprobs")]
    assert [value for each in outputs for value in each.token_logprobs] == [-0.5, -0.5]
    assert [token for each in outputs for token in each.token_ids] == [7, 7]
    assert [found for each in outputs for found in each.top_logprobs] == [wanted, wanted][: 2 * top]
    (prompt,) = [each.input_logprobs for each in holders if each.HasField("input_logprobs")]
    assert [each.HasField("value") for each in prompt.token_logprobs] == [False, True]
    assert (prompt.token_logprobs[1].value, [*prompt.token_ids]) == (-0.5, [1, 7])
    assert [*prompt.top_logprobs] == [pb.TopLogProbs(), wanted if top else pb.TopLogProbs()]
    assert len(outputs) == (2 if stream else 1)


async def test_message_beyond_what_gateways_take(front: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a message is sent that its reader drops, taking the server for broken."""
    monkeypatch.setattr(vllm_service, "MAX_MESSAGE_BYTES", 1000)
    front.site.script.prompt_logprobs = [TokenLogprob(1, "E", -0.5, 1)] * 200
    error = await failed(front.generate(text="x", prompt_logprobs=0, stream=False))
    assert (error.code(), named_field(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "logprobs")
    assert front.site.script.answers[0].closed == 1


async def test_refused_by_the_engine(front: Scripted) -> None:
    """Red if a full queue isn't what the gateway turns into 429, or doesn't say when to come back."""
    front.site.script.refusal = ApiError(Code.RESOURCE_EXHAUSTED, "full", retry_after_s=1.5, reason="QUEUE_FULL")
    error = await failed(front.generate(text="x"))
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert (reason(error), retry_ms(error)) == ("QUEUE_FULL", 1500)


async def test_failure_after_tokens(front: Scripted) -> None:
    """Red if a lost engine core looks like a regular end."""
    front.site.script.steps = [words("a", "b")[0], ApiError(Code.UNAVAILABLE, "lost")]
    call = front.generate(text="x")
    assert [*(await anext(aiter(call))).chunk.token_ids] == [100]
    error = await failed(call)
    assert (error.code(), retry_ms(error)) == (grpc.StatusCode.UNAVAILABLE, 1000)


async def test_no_metadata_before_acceptance(front: Scripted) -> None:
    """Red if a call is told that it goes well while it may still be refused: a gateway would answer 200, then fail."""
    front.site.script.gated_acceptance = True
    call = front.generate(text="x")
    metadata = asyncio.ensure_future(call.initial_metadata())
    await until(lambda: len(front.site.script.answers) == 1)
    await asyncio.sleep(0.05)
    assert not metadata.done()
    front.site.script.answers[0].release()
    await metadata
    call.cancel()


PINGING = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 400),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
"""A client that pings more often than gateways do: what they do in 150 s of a silent prefill, it does in five."""
SILENCE_S = 5.0


async def test_pings_through_a_silent_prefill_cost_nothing(front: Scripted) -> None:
    """Red without GATEWAY_PINGS: the third ping without data in between closes the connection, with all calls on it."""
    front.site.script.gated_acceptance = True
    async with grpc.aio.insecure_channel(front.address, options=PINGING) as channel:
        request = pb.GenerateRequest(request_id="slow", text="x", stream=True)
        call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, timeout=HANG_GUARD_S)
        read = asyncio.ensure_future(call.read())
        await until(lambda: len(front.site.script.answers) == 1)
        await asyncio.sleep(SILENCE_S)
        assert not read.done(), "the call ended in the silence"
        front.site.script.answers[0].release()
        assert (await read).HasField("chunk")
        call.cancel()


async def test_an_abort_that_reaches_another_frontend() -> None:
    """Red if, with frontends that share a port, an Abort ends requests of the frontend that it reaches alone, or says
    that all is well although it had too many ids for the other to hear of."""
    async with socket_folder() as folder, AsyncExitStack() as stack:
        sites = Site(), Site()
        sites[1].script.steps = [*words("one", "two")[:1], None]
        first, second = [
            await stack.enter_async_context(fronting(site.served, Place(number, 2, str(folder))))
            for number, site in enumerate(sites, 1)
        ]
        call = second.generate(request_id="there", text="x")
        assert (await call.read()).HasField("chunk")
        for too_many in ([""] * 16385, ["x" * 131073]):  # the other frontend would get no line so long
            call_status = await failed(first.engine.Abort(pb.AbortRequest(request_ids=["there", *too_many])))
            assert (call_status.code(), named_field(call_status)) == (grpc.StatusCode.INVALID_ARGUMENT, "request_ids")
        await first.abort("there", "nowhere", *["\x01" * 8] * 16000)
        assert sites[1].script.answers[0].closed == 1
        sites[1].script.answers[0].release()
        assert (await call.read()).complete.finish_reason == "abort"
        assert sites[1].metrics.open_requests == 0


async def test_client_gone_in_a_blocked_write(front: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    """Red if a client that leaves while it isn't reading is taken for a failure of the server, or its request stays."""
    front.site.script.steps = [[Delta(0, "x", [1234] * 5000)]] * 4000
    call = front.generate(text="x")
    await call.read()
    written = -1
    while written != front.site.metrics.output_tokens:  # until no write ends any more
        written = front.site.metrics.output_tokens
        await asyncio.sleep(0.2)
    assert written < 5000 * 4000
    with caplog.at_level(logging.INFO):
        call.cancel()
        await until(lambda: front.site.metrics.open_requests == 0)
        await asyncio.sleep(0.05)
    assert caplog.records == []
    assert front.site.script.answers[0].closed == 1


async def test_closed_from_outside(front: Scripted) -> None:
    """Red if a handler that ends with GeneratorExit, as at a loop's end, leaves its request running."""
    front.site.script.steps = [None]
    request = pb.GenerateRequest(request_id="a", text="x")

    class Context:
        def time_remaining(self) -> None:
            return None

    handler: Any = front.service.Generate(request, Context())
    handler.send(None)
    assert front.site.metrics.open_requests == 1
    handler.close()
    assert front.site.metrics.open_requests == 0
    assert front.site.script.answers[0].closed == 1
    assert front.service._calls == {}


@pytest.mark.parametrize("method", ["Embed", "StartProfile", "StopProfile"])
async def test_not_here(front: Scripted, method: str) -> None:
    """Red if a method without an implementation fails in another way than UNIMPLEMENTED."""
    kinds = {"Embed": pb.EmbedRequest, "StartProfile": common.StartProfileRequest}
    error = await failed(getattr(front.engine, method)(kinds.get(method, common.StopProfileRequest)()))
    assert (error.code(), reason(error)) == (grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED")
