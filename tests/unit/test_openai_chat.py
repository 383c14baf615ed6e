"""Chats over the OpenAI endpoint, field by field, over scripted deltas."""

from __future__ import annotations

import pytest

from frontend.request import Delta, TokenLogprob, TopLogprob
from tests.unit.openai_answers import CHAT, events, post
from tests.unit.scripted_answers import THINKING_TEMPLATE, Site, words


@pytest.fixture
def site() -> Site:
    return Site()


async def test_whole_chat(site: Site) -> None:
    """Red if a field of OpenAI's chat.completion changes, or the prompt isn't the template's."""
    answer = await post(site, "/v1/chat/completions", CHAT | {"model": "tiny/alias"})
    usage = answer.pop("usage")
    assert answer == {
        "id": "chatcmpl-id1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "austen",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
    }
    assert usage["completion_tokens"] == 2
    prompt = site.tokenizer.decode(site.script.request.prompt_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert site.script.request.sampling.max_tokens is None


async def test_streamed_chat(site: Site) -> None:
    """Red if the events differ in shape from OpenAI's: the role first, then contents, then the reason."""
    opening, first, last = await events(site, "/v1/chat/completions", CHAT)
    assert opening == {
        "id": "chatcmpl-id1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "austen",
        "system_fingerprint": None,
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert first["choices"] == [{"index": 0, "delta": {"content": "Hello"}, "logprobs": None, "finish_reason": None}]
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({"content": " world"}, "stop")


async def test_chat_logprobs(site: Site) -> None:
    """Red if a chat's logprobs lose a field, or `bytes` are those of the replacement character."""
    half = next(id for id in range(4096) if site.tokenizer.token_bytes(id) == b"\xc3")
    entry = TokenLogprob(half, "\ufffd", -0.25, 1, (TopLogprob(7, "He", -0.5),))
    site.script.steps = [[Delta(0, "", [half], [entry], finish_reason="length")]]
    body = CHAT | {"logprobs": True, "top_logprobs": 1}
    top = {"token": "He", "logprob": -0.5, "bytes": [*site.tokenizer.token_bytes(7)]}
    expected = {
        "content": [{"token": "\ufffd", "logprob": -0.25, "bytes": [0xC3], "top_logprobs": [top]}],
        "refusal": None,
    }
    assert (await post(site, "/v1/chat/completions", body))["choices"][0]["logprobs"] == expected
    assert (await events(site, "/v1/chat/completions", body))[1]["choices"][0]["logprobs"] == expected


@pytest.mark.parametrize(
    ("opened", "pieces"),
    [(False, ("<thi", "nk>\nwhy", " not\n", "</th", "ink>\n\n", "Yes")), (True, ("why", " not\n</think>\n\nYes", ""))],
)
async def test_reasoning(opened: bool, pieces: tuple[str, ...]) -> None:
    """Red if reasoning leaks into the content of either kind of answer, or the other way round."""
    site = Site(THINKING_TEMPLATE)
    site.script.steps = words(*pieces)
    body = CHAT | {"chat_template_kwargs": {"open": opened}}
    message = (await post(site, "/v1/chat/completions", body))["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("why not", "why not", "Yes")
    deltas = [event["choices"][0]["delta"] for event in await events(site, "/v1/chat/completions", body)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why not"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "why not"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes"


async def test_an_answer_that_follows_a_grammar_is_content() -> None:
    """Red if such an answer is taken for reasoning because the prompt opened a think tag: no close tag can come."""
    site = Site(THINKING_TEMPLATE)
    site.script.steps = words('{"a":', "1}")
    body = CHAT | {"chat_template_kwargs": {"open": True}, "response_format": {"type": "json_object"}}
    message = (await post(site, "/v1/chat/completions", body))["choices"][0]["message"]
    assert message["content"] == '{"a":1}'
    deltas = [event["choices"][0]["delta"] for event in await events(site, "/v1/chat/completions", body)]
    assert "".join(delta.get("content", "") for delta in deltas) == '{"a":1}'


async def test_continued_message(site: Site) -> None:
    """Red if the prompt of a continued message ends behind its content, or an impossible one is guessed."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Dear Emma"}]
    await post(site, "/v1/chat/completions", {"messages": messages, "continue_final_message": True})
    prompt = site.tokenizer.decode(site.script.request.prompt_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nDear Emma")
    messages[1]["content"] = ""
    async with site.client() as client:
        refused = await client.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")


async def test_chat_without_a_template() -> None:
    """Red if a base model's chats fail with anything but a reason, or its completions fail too."""
    site = Site(with_template=False)
    async with site.client() as client:
        refused = await client.post("/v1/chat/completions", json=CHAT)
        served = await client.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, served.status_code) == (400, 200)
    assert "no chat template" in refused.json()["error"]["message"]
