"""Tool calls over HTTP: offered through the template, forced by a grammar, parsed back, streamed or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from greenlane.text.v1 import text_pb2

from scripts.serving import TINY
from tests.e2e.harness import Server, text_stub

pytestmark = pytest.mark.e2e

TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Bath", "York"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
ASK: dict[str, Any] = {
    "model": "calling",
    "messages": [{"role": "user", "content": "Will it rain?"}],
    "tools": [WEATHER, CLOCK],
    "max_tokens": 400,
    "temperature": 1,
    "seed": 4,
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model's template offers tools."""
    folder = tmp_path_factory.mktemp("calling") / "model"
    shutil.copytree(TINY, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    server = Server(tmp_path_factory.mktemp("log") / "serve.log", "--served-model-name=calling", model=folder)
    yield server
    assert server.stop() == 0, server.logged()


@pytest.fixture
def client(calling: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calling.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_come(client: openai.OpenAI, choice: Any) -> None:
    """Red when the SDK sees no call, one that isn't the tool's schema's, or another one in a stream."""
    ask = ASK | {"tool_choice": choice}
    (whole,) = client.chat.completions.create(**ask).choices
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    calls = whole.message.tool_calls
    assert calls
    for call in calls:
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert arguments["town"] in ("Bath", "York")
            assert 1 <= arguments["days"] <= 9
        else:
            assert (call.function.name, arguments) == ("clock", {})
    assert choice == "required" or [call.function.name for call in calls] == ["weather"]

    streamed: list[tuple[str | None, str | None]] = []
    reasons = set()
    for chunk in client.chat.completions.create(**ask, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            assert part.index == len(streamed)
            assert part.id
            assert part.function
            streamed.append((part.function.name, part.function.arguments))
        reasons.add(chunk.choices[0].finish_reason)
    assert streamed == [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]
    assert reasons == {None, "tool_calls"}


def test_a_call_over_text_grpc(client: openai.OpenAI, calling: Server) -> None:
    """Red when a call over text gRPC is another one than over HTTP."""
    (over_http,) = client.chat.completions.create(**ASK | {"tool_choice": "required"}).choices
    tools = [
        text_pb2.Tool(name=each["function"]["name"], parameters_json=json.dumps(each["function"]["parameters"]))
        for each in (WEATHER, CLOCK)
    ]
    chat = text_pb2.Chat(
        messages=[text_pb2.Message(role="user", content="Will it rain?")],
        tools=tools,
        tool_choice=text_pb2.TOOL_CHOICE_REQUIRED,
    )
    request = text_pb2.GenerateRequest(chat=chat, sampling=text_pb2.Sampling(max_tokens=400, temperature=1.0, seed=4))
    with text_stub(calling.grpc) as stub:
        deltas = [delta for response in stub.Generate(request) for delta in response.deltas]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [(call.name, call.arguments_json) for call in calls] == [
        (call.function.name, call.function.arguments)
        for call in over_http.message.tool_calls or []
        if call.type == "function"
    ]
    assert calls
    assert deltas[-1].finish_reason == "tool_calls"
    assert "".join(delta.text for delta in deltas) == ""


def test_tools_are_offered_and_answers_handed_back(client: openai.OpenAI) -> None:
    """Red when the template isn't given the tools, or the turn after a call can't be rendered."""
    free = client.chat.completions.create(**ASK | {"max_tokens": 5, "tool_choice": "auto"})
    none = client.chat.completions.create(**ASK | {"max_tokens": 5, "tool_choice": "none"})
    assert free.usage
    assert none.usage
    assert free.usage.prompt_tokens > none.usage.prompt_tokens + 40
    assert free.choices[0].message.content
    assert not free.choices[0].message.tool_calls
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bath"}'}}
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    after = client.chat.completions.create(**ASK | {"messages": turns, "max_tokens": 5})
    assert after.usage
    assert after.usage.prompt_tokens > free.usage.prompt_tokens + 15


def test_a_bad_schema_is_blamed_on_the_tools(client: openai.OpenAI) -> None:
    """Red when parameters that can't be compiled aren't answered with 400 and the field's name."""
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="nothing") as caught:
        client.chat.completions.create(**ASK | {"tools": [broken], "tool_choice": "required"})
    assert caught.value.param == "tools"


def test_a_model_without_tools_says_so(server: Server) -> None:
    """Red when tools are dropped in silence because the template doesn't know them."""
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=ASK | {"model": "tiny"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
