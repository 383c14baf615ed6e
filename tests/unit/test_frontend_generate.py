"""generate() over a real session: text, ends, aborts and errors, with an engine core that a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from greenlane.engine.v1 import engine_pb2 as pb

from frontend.generate import generate
from frontend.request import ApiError, Code, Sampling, TextRequest
from frontend.tokenizer import Tokenizer
from tests.unit.generate_bench import Bench, connected_bench, read, settled, text_of
from tests.unit.scripted_engine import (
    FIXTURE,
    finish,
    pack,
)

EOS = 2
THINK = 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FIXTURE)


@pytest_asyncio.fixture
async def bench(tokenizer: Tokenizer) -> AsyncIterator[Bench]:
    async with connected_bench(tokenizer) as bench:
        yield bench


# ------------------------------ text and ends


async def test_the_whole_text_and_its_usage(bench: Bench) -> None:
    """Red if text or tokens are lost, or usage miscounts."""
    generation = await bench.begin("It is a truth")
    text = "Größe, 東京 and 🙂 at the end"
    ids = await bench.say(text)
    await bench.session.send(
        started=pack([1], "<u8"), started_cached=pack([16], "<i4"), finishes=[finish(1, "LENGTH", output_tokens=9)]
    )
    deltas = await read(generation)
    assert text_of(deltas) == text
    assert [token for delta in deltas for token in delta.token_ids] == ids
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("length", None)
    usage = generation.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(bench.ids("It is a truth")), len(ids))
    assert usage.cached_tokens == 16
    assert await settled(bench) == []


@pytest.mark.parametrize(
    ("fields", "shared"),
    [({}, True), ({"stop": ("zebra",)}, False), ({"sampling": Sampling(max_tokens=99, logprobs=0)}, False)],
)
async def test_what_a_reader_left_unread_comes_in_one_delta(bench: Bench, fields: dict[str, Any], shared: bool) -> None:
    """Red if a reader that fell behind pays for every token, or if logprobs and stop strings lose their token."""
    generation = await bench.begin(**fields)
    text = "Größe, 東京 and 🙂 so on"
    ids = bench.ids(text)
    logprobs = pb.LogprobColumns(
        rows=pack(range(len(ids)), "<u4"),
        sampled=pack([-1.0] * len(ids), "<f4"),
        ranks=pack([1] * len(ids), "<i4"),
        counts=pack([0] * len(ids), "<u4"),
    )
    wanted = {"logprobs": logprobs} if "sampling" in fields else {}
    await bench.session.send(tokens=[(1, token) for token in ids], **wanted)
    deltas = await anext(generation)
    assert [delta.token_ids for delta in deltas] == ([ids] if shared else [[token] for token in ids])
    assert text_of(deltas) == text
    assert generation.usage.completion_tokens == len(ids)


async def test_half_a_character_at_the_end_is_shown_as_undecodable(bench: Bench) -> None:
    """Red if held bytes are dropped at the end, or if the end's text has no delta."""
    generation = await bench.begin()
    ids = bench.ids("🙂")[:-1]
    await bench.session.send(tokens=[(1, token) for token in ids])
    await bench.session.send(finishes=[finish(1, "LENGTH")])
    deltas = await read(generation)
    assert text_of(deltas) == "�"
    assert text_of(deltas[:-1]) == ""
    assert deltas[-1].token_ids == [] or len(deltas) == len(ids)


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("include_stop", [True, False])
async def test_a_stop_string_across_tokens(bench: Bench, one_by_one: bool, include_stop: bool) -> None:
    """Red if a stop string is only seen within a token, leaks into the text, or leaves the engine core working."""
    generation = await bench.begin(stop=("SET, b",), include_stop=include_stop)
    await bench.say("sunSET, but not the rest", one_by_one=one_by_one)
    deltas = await read(generation)
    assert text_of(deltas) == ("sunSET, b" if include_stop else "sun")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "SET, b")
    assert await settled(bench) == [1]
    shown = [token for delta in deltas for token in delta.token_ids]
    assert generation.usage.completion_tokens == len(shown) < len(bench.ids("sunSET, but not the rest"))


async def test_a_possible_stop_prefix_is_released_at_the_end(bench: Bench) -> None:
    """Red if text held back for a stop string is lost when the sequence ends otherwise."""
    generation = await bench.begin(stop=("ending later",))
    await bench.say("the end")
    await bench.session.send(tokens=[(1, EOS)], finishes=[finish(1, stop_token_id=EOS)])
    deltas = await read(generation)
    assert text_of(deltas) == "the end"
    assert (deltas[-1].token_ids, deltas[-1].finish_reason, deltas[-1].stop_reason) == ([EOS], "stop", None)


async def test_stop_strings_wait_for_min_tokens(bench: Bench) -> None:
    """Red if a stop string among the first min_tokens tokens ends the sequence."""
    ids = bench.ids("no no no")
    generation = await bench.begin(stop=("no",), sampling=Sampling(min_tokens=len(ids)))
    await bench.say("no no no")
    await bench.say("; no")
    deltas = await read(generation)
    assert text_of(deltas) == "no no no; "
    assert deltas[-1].stop_reason == "no"


async def test_a_closing_id_has_no_text_unless_ordinary_and_wanted(bench: Bench) -> None:
    """Red if the text of a stop id is shown unasked, or hidden when include_stop asks for it."""
    word = bench.ids(" the")[0]
    for include_stop, shown in ((False, "see"), (True, "see the")):
        number = len(bench.session.adds) + 1
        generation = await bench.begin(include_stop=include_stop, sampling=Sampling(stop_token_ids=(word,)))
        await bench.say("see", number)
        await bench.session.send(tokens=[(number, word)], finishes=[finish(number, stop_token_id=word)])
        deltas = await read(generation)
        assert text_of(deltas) == shown
        assert (deltas[-1].token_ids, deltas[-1].stop_reason) == ([word], word)


async def test_special_tokens_are_shown_only_on_demand(bench: Bench) -> None:
    """Red if skip_special_tokens is ignored, or eos shows up with it off."""
    for skip, shown in ((True, "ab"), (False, "<think>ab")):
        number = len(bench.session.adds) + 1
        generation = await bench.begin(skip_special_tokens=skip, include_stop=True)
        await bench.session.send(tokens=[(number, THINK)])
        await bench.say("ab", number)
        await bench.session.send(tokens=[(number, EOS)], finishes=[finish(number, stop_token_id=EOS)])
        assert text_of(await read(generation)) == shown


async def test_sequences_interleave_and_end_alone(bench: Bench) -> None:
    """Red if n sequences share text state, or if one's stop string ends the others."""
    generation = await bench.begin(stop=("stop",), sampling=Sampling(n=3))
    for token_1, token_3 in zip(bench.ids("one 東"), bench.ids("two 京"), strict=False):
        await bench.session.send(tokens=[(1, token_1), (3, token_3)])
    await bench.say("now stop", number=2)
    await bench.session.send(finishes=[finish(1, "LENGTH"), finish(3, "LENGTH")])
    deltas = await read(generation)
    size = min(len(bench.ids("one 東")), len(bench.ids("two 京")))
    assert text_of(deltas, 0) == bench.tokenizer.decode(bench.ids("one 東")[:size])
    assert text_of(deltas, 1) == "now "
    assert text_of(deltas, 2) == bench.tokenizer.decode(bench.ids("two 京")[:size])
    assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2]
    assert await settled(bench) == [2]


# ------------------------------ logprobs


async def test_logprobs_stand_beside_their_tokens(bench: Bench) -> None:
    """Red if rows of other requests shift the columns, or alternatives lose order or text."""
    generation = await bench.begin(sampling=Sampling(logprobs=2))
    other = await bench.begin()
    a, b = bench.ids(" the")[0], bench.ids("🙂")[0]
    columns = pb.LogprobColumns(
        rows=pack([1], "<u4"),
        sampled=pack([-0.5], "<f4"),
        ranks=pack([2], "<i4"),
        counts=pack([2], "<u4"),
        top_ids=pack([b, a], "<i4"),
        top_logprobs=pack([-0.25, -0.5], "<f4"),
    )
    await bench.session.send(tokens=[(2, 9), (1, a)], logprobs=columns)
    await bench.session.send(finishes=[finish(1, "LENGTH"), finish(2, "LENGTH")])
    deltas = await read(generation)
    assert deltas[0].logprobs is not None
    (logprob,) = deltas[0].logprobs
    assert (logprob.id, logprob.token, logprob.logprob, logprob.rank) == (a, " the", -0.5, 2)
    assert [(top.id, top.token, top.logprob) for top in logprob.top] == [(b, "�", -0.25), (a, " the", -0.5)]
    assert {delta.logprobs for delta in await read(other)} == {None}


async def test_missing_logprobs_fail_the_request(bench: Bench) -> None:
    """Red if tokens without the logprobs that were asked for are passed on."""
    generation = await bench.begin(sampling=Sampling(logprobs=0))
    await bench.session.send(tokens=[(1, 9)])
    with pytest.raises(ApiError) as failed:
        await read(generation)
    assert failed.value.code is Code.INTERNAL
    assert await settled(bench) == [1]


@pytest.mark.parametrize("top", [0, 20])
async def test_prompt_logprobs_are_complete_before_the_first_delta(bench: Bench, top: int) -> None:
    """Red if stretches are lost or joined in the wrong place; 20 alternatives take the path of the worker thread."""
    prompt = "word " * 120
    generation = await bench.begin(prompt, sampling=Sampling(prompt_logprobs=top))
    ids = bench.ids(prompt)
    for start, end in ((1, 4), (4, len(ids))):
        count = end - start
        stretch = pb.PromptLogprobs(
            number=1,
            start=start,
            logprobs=pack([-float(at) for at in range(start, end)], "<f4"),
            ranks=pack([1] * count, "<i4"),
            top=top,
            top_ids=pack([7] * count * top, "<i4"),
            top_logprobs=pack([-1.0] * count * top, "<f4"),
        )
        await bench.session.send(prompt_logprobs=[stretch])
    await bench.session.send(tokens=[(1, 9)], finishes=[finish(1, "LENGTH")])
    async for _ in generation:
        assert generation.prompt_logprobs is not None
        assert [entry.id for entry in generation.prompt_logprobs] == ids
    assert generation.prompt_logprobs is not None
    assert [entry.logprob for entry in generation.prompt_logprobs] == [None, *(-float(at) for at in range(1, len(ids)))]
    assert {len(entry.top) for entry in generation.prompt_logprobs[1:]} == {top}


async def test_prompt_logprobs_out_of_place_fail_the_request(bench: Bench) -> None:
    """Red if a gap in the stretches goes unnoticed."""
    generation = await bench.begin("some words here", sampling=Sampling(prompt_logprobs=0))
    stretch = pb.PromptLogprobs(number=1, start=2, logprobs=pack([-1], "<f4"), ranks=pack([1], "<i4"))
    await bench.session.send(prompt_logprobs=[stretch])
    with pytest.raises(ApiError) as failed:
        await read(generation)
    assert failed.value.code is Code.INTERNAL


# ------------------------------ refusals and errors


async def test_a_refusal_comes_before_acceptance(bench: Bench) -> None:
    """Red if accepted() returns for a refused request, or the reason's fields are lost."""
    generation = generate(bench.client, bench.tokenizer, TextRequest([1], Sampling(n=2)))
    accepting = asyncio.create_task(generation.accepted())
    await bench.session.next_add()
    error = pb.Error(code=8, message="queue full", parameter="n", retry_after_s=2.5)
    await bench.session.send(finishes=[finish(1, "REJECTED", error=error), finish(2, "REJECTED", error=error)])
    with pytest.raises(ApiError) as refused:
        await accepting
    raised = refused.value
    assert (raised.code, raised.message, raised.parameter) == (Code.RESOURCE_EXHAUSTED, "queue full", "n")
    assert raised.retry_after_s == 2.5
    await generation.aclose()


async def test_an_error_comes_after_the_text_before_it(bench: Bench) -> None:
    """Red if text that arrived before the failure is dropped, or the other sequences of the request run on."""
    generation = await bench.begin(sampling=Sampling(n=2))
    await bench.session.send(
        tokens=[(1, bench.ids("x")[0])], finishes=[finish(1, "ERROR", error=pb.Error(code=13, message="out of memory"))]
    )
    deltas = await anext(generation)
    with pytest.raises(ApiError) as failed:
        await anext(generation)
    assert (text_of(deltas), failed.value.code, failed.value.message) == ("x", Code.INTERNAL, "out of memory")
    assert await settled(bench) == [2]


async def test_an_abort_by_the_engine_core_is_no_regular_end(bench: Bench) -> None:
    """Red if a request that the engine core gave up looks complete."""
    generation = await bench.begin()
    await bench.session.send(finishes=[finish(1, "ABORT")])
    with pytest.raises(ApiError) as failed:
        await read(generation)
    assert failed.value.code is Code.CANCELLED


async def test_a_lost_session_ends_the_generation(bench: Bench) -> None:
    """Red if a generation hangs when the engine core goes away."""
    generation = await bench.begin()
    await bench.say("a")
    bench.session.end()
    with pytest.raises(ApiError) as failed:
        await read(generation)
    assert failed.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a" * 257,)}, "stop"),
        ({"stop": ("a",) * 17}, "stop"),
        ({"sampling": Sampling(n=129)}, "n"),
        ({"sampling": Sampling(n=0)}, "n"),
        ({"sampling": Sampling(seed=2**64)}, "seed"),
        ({"sampling": Sampling(seed=-1)}, "seed"),
        ({"sampling": Sampling(max_tokens=-1)}, "max_tokens"),
        ({"sampling": Sampling(max_tokens=2**40)}, "max_tokens"),
        ({"sampling": Sampling(top_k=2**31)}, "top_k"),
        ({"sampling": Sampling(stop_token_ids=(2**31,))}, "stop_token_ids"),
        ({"sampling": Sampling(stop_token_ids=(1,) * 129)}, "stop_token_ids"),
        ({"sampling": Sampling(logit_bias={2**31: 1.0})}, "logit_bias"),
        ({"sampling": Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))}, "logit_bias"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": "é" * 129}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"label": "x" * 257}, "request_id"),
        ({"prompt_ids": [2**31]}, "prompt"),
        ({"prompt_ids": [1] * (1 << 18)}, "prompt"),
    ],
)
async def test_what_has_no_place_on_the_wire_is_refused_by_name(
    bench: Bench, fields: dict[str, object], parameter: str
) -> None:
    """Red if a value overflows its wire type as an exception of another kind, or is allocated from before a check."""
    request = TextRequest(**({"prompt_ids": [1]} | fields))  # type: ignore[arg-type]
    with pytest.raises(ApiError) as refused:
        await generate(bench.client, bench.tokenizer, request).accepted()
    assert (refused.value.code, refused.value.parameter) == (Code.INVALID_ARGUMENT, parameter)
    assert bench.client.open_sequences == 0


# ------------------------------ leaving early


async def test_cancellation_while_waiting_aborts_once(bench: Bench) -> None:
    """Red if a cancelled reader leaves the engine core decoding, or aborts twice with the aclose that follows."""
    generation = await bench.begin(sampling=Sampling(n=2))
    reader = asyncio.create_task(read(generation))
    await bench.say("a")
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await generation.aclose()
    assert await settled(bench) == [1, 2]


async def test_cancellation_before_acceptance_aborts(bench: Bench) -> None:
    """Red if a client that leaves while its request waits in the queue leaves it there."""
    generation = generate(bench.client, bench.tokenizer, TextRequest([1]))
    accepting = asyncio.create_task(generation.accepted())
    await bench.session.next_add()
    accepting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await accepting
    assert await settled(bench) == [1]


async def test_leaving_the_context_aborts(bench: Bench) -> None:
    """Red if a reader that breaks off (GeneratorExit in an edge's generator) leaves the request open."""
    async with await bench.begin() as generation:
        await bench.say("many words come")
        async for _ in generation:
            break
    assert await settled(bench) == [1]
    with pytest.raises(ApiError) as closed:
        await read(generation)
    assert closed.value.code is Code.CANCELLED


async def test_closing_after_the_end_aborts_nothing(bench: Bench) -> None:
    """Red if a finished request is aborted: its number may be counted as an abort."""
    generation = await bench.begin()
    await bench.session.send(tokens=[(1, EOS)], finishes=[finish(1, stop_token_id=EOS)])
    await read(generation)
    await generation.aclose()
    assert await settled(bench) == []
    assert bench.client.open_sequences == 0


async def test_closing_wakes_a_reader_elsewhere(bench: Bench) -> None:
    """Red if aclose() from another task leaves the reader waiting for ever."""
    generation = await bench.begin()
    reader = asyncio.create_task(read(generation))
    await asyncio.sleep(0)
    await generation.aclose()
    with pytest.raises(ApiError):
        await reader
