"""The OpenAI endpoints' answers, field by field, over scripted deltas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frontend.openai_api import TURN
from frontend.request import ApiError, Code, Delta, TokenLogprob
from tests.unit.openai_answers import CHAT, LOGPROB, NEVER, events, post
from tests.unit.scripted_answers import Site, until, words


@pytest.fixture
def site() -> Site:
    return Site()


# ------------------------------ completions


async def test_whole_completion(site: Site) -> None:
    """Red if a field of OpenAI's text_completion changes its name, place or value."""
    assert await post(site, "/v1/completions", {"model": "austen", "prompt": "Emma"}) == {
        "id": "cmpl-id1",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "austen",
        "system_fingerprint": None,
        "choices": [
            {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": len(site.script.request.prompt_ids),
            "total_tokens": len(site.script.request.prompt_ids) + 2,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    request = site.script.request
    assert (site.tokenizer.decode(request.prompt_ids), request.sampling.max_tokens) == ("Emma", 16)
    assert (request.label, site.script.answers[0].closed) == ("cmpl-id1", 1)


async def test_streamed_completion(site: Site) -> None:
    """Red if the events differ in shape from OpenAI's, or several deltas become one event."""
    site.script.steps = [[Delta(0, "a", [1]), Delta(0, 'b"\n', [2])], *words("é", "")]
    first, second, third, last = await events(site, "/v1/completions", {"prompt": "x"})
    assert first == {
        "id": "cmpl-id1",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "austen",
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "stop_reason": None}],
    }
    assert (second["choices"][0]["text"], third["choices"][0]["text"]) == ('b"\n', "é")
    assert second.keys() == first.keys()
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["text"]) == ("stop", "")


async def test_stream_usage(site: Site) -> None:
    """Red if include_usage loses its last event, its nulls before, or continuous usage counts wrongly."""
    options = {"stream_options": {"include_usage": True}}
    first, last, usage = await events(site, "/v1/completions", {"prompt": "x"} | options)
    assert (first["usage"], last["usage"], usage["choices"]) == (None, None, [])
    assert (usage["usage"]["completion_tokens"], usage["usage"]["prompt_tokens_details"]) == (2, {"cached_tokens": 3})
    options["stream_options"]["continuous_usage_stats"] = True
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        counts = [event["usage"]["completion_tokens"] for event in await events(site, path, body | options)]
        assert counts[-3:] == [1, 2, 2], path


async def test_stop_reason(site: Site) -> None:
    """Red if what ended a sequence isn't told, as the string or the id that it was."""
    for reason in ("END", 42):
        site.script.steps = [[Delta(0, "a", [1], finish_reason="stop", stop_reason=reason)]]
        whole = await post(site, "/v1/completions", {"prompt": "x", "stop": "END"})
        assert whole["choices"][0]["stop_reason"] == reason
        chat = await post(site, "/v1/chat/completions", CHAT)
        assert chat["choices"][0]["stop_reason"] == reason
    assert site.script.answers[0].request.stop == ("END",)


async def test_several_prompts_and_sequences(site: Site) -> None:
    """Red if choices aren't numbered prompt by prompt, or a sequence's text lands in another choice."""
    site.script.steps = [[Delta(1, "B", [2]), Delta(0, "A", [1])], *words("a"), *words("b", index=1, finish="length")]
    body = {"prompt": ["one", "two"], "n": 2}
    answer = await post(site, "/v1/completions", body)
    shown = [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]]
    assert shown == [(0, "Aa", "stop"), (1, "Bb", "length"), (2, "Aa", "stop"), (3, "Bb", "length")]
    assert answer["usage"]["completion_tokens"] == 8
    texts = dict.fromkeys(range(4), "")
    for event in await events(site, "/v1/completions", body):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "Aa", 1: "Bb", 2: "Aa", 3: "Bb"}


async def test_completion_logprobs(site: Site) -> None:
    """Red if a column is misplaced, an offset ignores the echo, or an infinite logprob breaks the JSON."""
    site.script.steps = [
        [Delta(0, "He", [7], [LOGPROB])],
        [Delta(0, "\ufffd", [9], [NEVER], finish_reason="length")],
    ]
    body = {"prompt": "Emma", "logprobs": 2}
    expected = {
        "text_offset": [0, 2],
        "token_logprobs": [-0.5, -9999.0],
        "tokens": ["He", "\ufffd"],
        "top_logprobs": [{"He": -0.5, "It": -1.5}, {"\ufffd": -9999.0}],
    }
    answer = await post(site, "/v1/completions", body)
    assert answer["choices"][0]["logprobs"] == expected
    streamed = [event["choices"][0]["logprobs"] for event in await events(site, "/v1/completions", body)]
    assert [part["text_offset"] for part in streamed] == [[0], [2]]
    assert streamed[0]["top_logprobs"] == [{"He": -0.5, "It": -1.5}]
    site.script.prompt_logprobs = [TokenLogprob(1, "Em", None, None), TokenLogprob(2, "ma", -2.0, 4, ())]
    for choice in (
        (await post(site, "/v1/completions", body | {"echo": True}))["choices"][0],
        (await events(site, "/v1/completions", body | {"echo": True}))[0]["choices"][0],
    ):
        assert choice["text"].startswith("EmmaHe")
        assert choice["logprobs"]["tokens"][:3] == ["Em", "ma", "He"]
        assert choice["logprobs"]["text_offset"][:3] == [0, 2, 4]
        assert choice["logprobs"]["token_logprobs"][:3] == [None, -2.0, -0.5]
        assert choice["logprobs"]["top_logprobs"][:2] == [None, {"ma": -2.0}]


async def test_scoring_only(site: Site) -> None:
    """Red if echo with max_tokens 0 shows the token that had to be drawn."""
    site.script.prompt_logprobs = [TokenLogprob(1, "Emma", None, None)]
    site.script.steps = [[Delta(0, "He", [7], [LOGPROB], finish_reason="length")]]
    body = {"prompt": "Emma", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = await post(site, "/v1/completions", body)
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]["tokens"]) == ("Emma", ["Emma"])
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    (only,) = await events(site, "/v1/completions", body)
    assert (only["choices"][0]["text"], only["choices"][0]["logprobs"]["tokens"]) == ("Emma", ["Emma"])


async def test_token_ids_and_prompt_logprobs(site: Site) -> None:
    """Red if return_token_ids or prompt_logprobs lose vLLM's places in the answer."""
    ids = site.tokenizer.encode_inline("Emma")
    body = {"prompt": ids, "return_token_ids": True, "echo": True}
    choice = (await post(site, "/v1/completions", body | {"prompt_logprobs": 1}))["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, [100, 101])
    assert (choice["text"], choice["prompt_logprobs"]) == ("EmmaHello world", [])
    streamed = [event["choices"][0] for event in await events(site, "/v1/completions", body)]
    assert [part["token_ids"] for part in streamed] == [[100], [101]]
    assert [part["prompt_token_ids"] for part in streamed] == [ids, None]
    site.script.prompt_logprobs = [TokenLogprob(1, "E", None, None), LOGPROB]
    chat = await post(site, "/v1/chat/completions", CHAT | {"prompt_logprobs": 2, "return_token_ids": True})
    assert chat["prompt_logprobs"] == [
        None,
        {
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": "He"},
            "8": {"logprob": -1.5, "rank": 2, "decoded_token": "It"},
        },
    ]
    assert chat["prompt_token_ids"] == site.script.request.prompt_ids
    assert chat["choices"][0]["token_ids"] == [100, 101]
    opening, *rest = await events(site, "/v1/chat/completions", CHAT | {"return_token_ids": True})
    assert opening["prompt_token_ids"] == site.script.request.prompt_ids
    assert [event["choices"][0]["token_ids"] for event in rest] == [[100], [101]]


# ------------------------------ refusals and failures


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry"),
    [
        (ApiError(Code.INVALID_ARGUMENT, "top_p is 3", "top_p"), 400, "invalid_request_error", None),
        (ApiError(Code.RESOURCE_EXHAUSTED, "full", retry_after_s=2.2), 429, "rate_limit_error", "3"),
        (ApiError(Code.UNAVAILABLE, "no engine"), 503, "service_unavailable_error", "1"),
        (ApiError(Code.DEADLINE_EXCEEDED, "late"), 504, "timeout_error", None),
        (ApiError(Code.INTERNAL, "the forward failed: ValueError"), 500, "server_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refused_by_the_engine(
    site: Site, error: ApiError, status: int, kind: str, retry: str | None, stream: bool
) -> None:
    """Red if headers are sent before the engine core's answer is known, or a refusal has another status."""
    site.script.refusal = error
    async with site.client() as client:
        for path, body in (("/v1/completions", {"prompt": ["x", "y"]}), ("/v1/chat/completions", CHAT)):
            response = await client.post(path, json=body | {"stream": stream})
            assert response.status_code == status
            assert response.json() == {
                "error": {"message": error.message, "type": kind, "param": error.parameter, "code": None}
            }
            assert response.headers.get("retry-after") == retry
    assert all(answer.closed == 1 for answer in site.script.answers)
    assert (site.metrics.open_requests, len(site.script.answers)) == (0, 3)


async def test_prompts_are_asked_together(site: Site) -> None:
    """Red if a call's prompts wait for each other's acceptance: a round trip each."""
    site.script.gated_acceptance = True
    async with site.client() as client:
        asking = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": ["x", "y", "z"]}))
        await until(lambda: len(site.script.answers) == 3)
        await until(lambda: all(answer.asked for answer in site.script.answers))
        for answer in site.script.answers:
            answer.release()
        assert (await asking).status_code == 200


async def test_chat_names_its_own_fields(site: Site) -> None:
    """Red if a chat is told of a parameter that chats don't have."""
    async with site.client() as client:
        for blamed, named in (("prompt", "messages"), ("logprobs", "top_logprobs"), ("top_p", "top_p")):
            site.script.refusal = ApiError(Code.INVALID_ARGUMENT, "no", blamed)
            response = await client.post("/v1/chat/completions", json=CHAT)
            assert response.json()["error"]["param"] == named


async def test_failure_in_a_stream(site: Site) -> None:
    """Red if a request that fails after its first token ends without an error event and [DONE]."""
    site.script.steps = [*words("a", "b")[:1], ApiError(Code.UNAVAILABLE, "the engine core was lost")]
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        *_, last = await events(site, path, body)
        assert last["error"]["message"] == "the engine core was lost"
        assert last["error"]["type"] == "service_unavailable_error"
    async with site.client() as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 503


@pytest.mark.parametrize("prompts", [["x"] * 512, [[5]] * 512])
async def test_many_prompts_leave_room_for_others(site: Site, prompts: list[Any]) -> None:
    """Red if the prompts of one body are tokenized, asked or answered without a turn of the event loop in between."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await post(site, "/v1/completions", {"prompt": prompts})
    counting.cancel()
    assert turns >= len(prompts) + 3 * len(prompts) // TURN, "by prompt, then asked, accepted and read by TURN of them"


async def test_one_of_many_prompts_fails_while_others_are_still_to_begin(site: Site) -> None:
    """Red if what wasn't begun when a prompt failed is begun afterwards, or left behind."""
    site.script.next_steps = [[ApiError(Code.INTERNAL, "this one failed")], *([[None]] * (3 * TURN))]
    async with site.client() as client:
        response = await client.post("/v1/completions", json={"prompt": ["x"] * (3 * TURN)})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "this one failed")
    assert {answer.closed for answer in site.script.answers} == {1}


async def test_one_of_several_prompts_fails(site: Site) -> None:
    """Red if a call's other prompts go on after one of them has failed."""
    site.script.next_steps = [[None], [ApiError(Code.INTERNAL, "this one failed")]]
    async with site.client() as client:
        response = await client.post("/v1/completions", json={"prompt": ["x", "y"]})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "this one failed")
    assert [answer.closed for answer in site.script.answers] == [1, 1]


async def test_unknown_model(site: Site) -> None:
    """Red if a foreign model is served, or the refusal isn't OpenAI's."""
    async with site.client() as client:
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", CHAT),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            error = (await client.post(path, json=body | {"model": "gpt"})).json()["error"]
            assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert site.script.answers == []


async def test_draining(site: Site) -> None:
    """Red if a stopping server takes requests, or its health doesn't say so."""
    site.served.drain()
    async with site.client() as client:
        response = await client.post("/v1/completions", json={"prompt": "x"})
        health = await client.get("/health")
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert (health.status_code, health.json()["status"]) == (503, "draining")


# ------------------------------ models and tokens


async def test_models(site: Site) -> None:
    """Red if a served name is missing, or a name with a slash can't be asked for."""
    async with site.client() as client:
        listed = (await client.get("/v1/models")).json()
        one = await client.get("/v1/models/tiny/alias")
        none = await client.get("/v1/models/gpt")
    assert listed["object"] == "list"
    assert listed["data"][1] == one.json()
    assert one.json() == {
        "id": "tiny/alias",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "greenlane",
        "root": "austen",
        "parent": None,
        "max_model_len": 2048,
    }
    assert none.status_code == 404


async def test_a_context_that_is_not_known_yet_has_no_length(site: Site) -> None:
    """Red if a client that asks while the model still loads takes 0 tokens for what the context holds."""
    site.engine.info = None
    async with site.client() as client:
        listed = (await client.get("/v1/models")).json()
    assert listed["data"][0]["max_model_len"] is None


async def test_tokenize_and_back(site: Site) -> None:
    """Red if tokens and text don't give each other back, or the shapes aren't vLLM's."""
    tokens = await post(site, "/tokenize", {"prompt": "Emma Woodhouse", "return_token_strs": True})
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 2048)
    assert "".join(tokens["token_strs"]) == "Emma Woodhouse"
    assert await post(site, "/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": "Emma Woodhouse"}
    chat = await post(site, "/tokenize", CHAT)
    assert chat["token_strs"] is None
    assert (await post(site, "/detokenize", {"tokens": chat["tokens"]}))["prompt"].endswith("assistant\n")


@pytest.mark.parametrize("token", [4096, 2**31 - 1])
async def test_ids_that_the_model_does_not_have_are_refused(site: Site, token: int) -> None:
    """Red if an id outside the vocabulary is silently no text; the padding behind the tokenizer's ids is none such."""
    async with site.client() as client:
        refused = await client.post("/detokenize", json={"tokens": [1, token]})
        echoed = await client.post("/v1/completions", json={"prompt": [token], "echo": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    assert (echoed.status_code, echoed.json()["error"]["param"]) == (400, "prompt")
    assert await post(site, "/detokenize", {"tokens": [4095]}) is not None


async def test_tokenize_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if text that no prompt may have is tokenized because nothing is generated from it: a minute of a core."""
    longest = 2048 * site.tokenizer.longest_token
    monkeypatch.setattr(site.tokenizer, "encode_inline", lambda *_: [1])
    async with site.client() as client:
        for body in ({"prompt": "a" * (longest + 1)}, {"messages": [{"role": "user", "content": "a" * longest}]}):
            refused = await client.post("/tokenize", json=body)
            assert refused.status_code == 400
            assert "the context of 2048 tokens holds at most" in refused.json()["error"]["message"]
        site.engine.info = None
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 503
    assert (await post(Site(), "/tokenize", {"prompt": "a" * longest}))["count"] > 1
