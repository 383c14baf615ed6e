"""Tools over text gRPC: what the template and the engine core get, and the calls in the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from greenlane.text.v1 import text_pb2 as pb

from frontend.request import Delta
from tests.unit.rich_errors import named_field
from tests.unit.scripted_answers import Site, words
from tests.unit.text_front import Front, failed, text_front

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{# <tool_call> #}"
    "{% for m in messages %}{{ m.role }}{{ m.tool_call_id or '' }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.name }}{{ c.function.arguments.town }}{% endfor %}\n"
    "{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"town": {"enum": ["Bath", "York"]}}}
WEATHER = pb.Tool(name="weather", description="Of a town.", parameters_json=json.dumps(SCHEMA))
CLOCK = pb.Tool(name="clock")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Bath"}}\n</tool_call>'


@pytest_asyncio.fixture
async def front() -> AsyncIterator[Front]:
    async with text_front(Site(TEMPLATE)) as front:
        yield front


def chat(**fields: Any) -> pb.Chat:
    return pb.Chat(messages=[pb.Message(role="user", content="Rain?")], **fields)


async def answered(front: Front, asked: pb.Chat, **fields: Any) -> list[pb.Delta]:
    return [delta async for message in front.generate(chat=asked, **fields) for delta in message.deltas]


async def test_tools_are_offered(front: Front) -> None:
    """Red if the template doesn't get a tool as it does over HTTP, or gets one that isn't to be offered."""
    await answered(front, chat(tools=[WEATHER, CLOCK]))
    prompt = front.site.tokenizer.decode(front.site.script.request.prompt_ids).splitlines()
    function = {"name": "weather", "description": "Of a town.", "parameters": SCHEMA}
    assert [json.loads(line) for line in prompt[:2]] == [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "clock"}},
    ]
    assert front.site.script.request.grammar is None
    tokens = await front.text.Tokenize(pb.TokenizeRequest(chat=chat(tools=[WEATHER, CLOCK])))
    assert list(tokens.ids) == front.site.script.request.prompt_ids
    await answered(front, chat(tools=[WEATHER], tool_choice=pb.TOOL_CHOICE_NONE))
    assert front.site.tokenizer.decode(front.site.script.request.prompt_ids) == "user: Rain?"


async def test_earlier_calls(front: Front) -> None:
    """Red if the turn after a call can't be rendered: the call's arguments as an object, whose answer it is."""
    call = pb.ToolCall(id="c1", name="weather", arguments_json='{"town": "York"}')
    turns = [
        pb.Message(role="assistant", tool_calls=[call]),
        pb.Message(role="tool", content="Rain.", tool_call_id="c1"),
    ]
    await answered(front, pb.Chat(messages=turns))
    prompt = front.site.tokenizer.decode(front.site.script.request.prompt_ids)
    assert prompt == "assistant: c1=weatherYorktoolc1: Rain."


@pytest.mark.parametrize("fields", [{"tool_choice": pb.TOOL_CHOICE_REQUIRED}, {"required_tool": "clock"}])
async def test_a_call_that_must_come(front: Front, fields: dict[str, Any]) -> None:
    """Red if nothing holds the answer to a call, or to the wrong one."""
    await answered(front, chat(tools=[WEATHER, CLOCK], **fields))
    grammar = front.site.script.request.grammar
    assert grammar is not None
    assert ("weather" in grammar.text, "clock" in grammar.text) == ("tool_choice" in fields, True)
    assert ("{0,7}" in grammar.text) == ("tool_choice" in fields)
    await answered(front, chat(tools=[WEATHER], tool_choice=pb.TOOL_CHOICE_REQUIRED, parallel_tool_calls=False))
    grammar = front.site.script.request.grammar
    assert grammar is not None
    assert "{0," not in grammar.text


async def test_calls_in_the_answer(front: Front) -> None:
    """Red if a call comes as text, in pieces, twice or in another sequence, or the end isn't told as one of calls."""
    steps = words("It ", "is: ", *CALL, index=0)
    steps[0].append(Delta(1, "No", [7], finish_reason="stop"))
    front.site.script.steps = steps
    deltas = await answered(front, chat(tools=[WEATHER]), sampling=pb.Sampling(n=2))
    first = [delta for delta in deltas if delta.index == 0]
    calls = [call for delta in first for call in delta.tool_calls]
    assert [(call.name, json.loads(call.arguments_json)) for call in calls] == [("weather", {"town": "Bath"})]
    assert calls[0].id.startswith("call_")
    assert "".join(delta.text for delta in first) == "It is:"
    assert first[-1].finish_reason == "tool_calls"
    assert sum(len(delta.token_ids) for delta in first) == len(CALL) + 2
    (other,) = [delta for delta in deltas if delta.index == 1]
    assert (other.text, other.finish_reason, len(other.tool_calls)) == ("No", "stop", 0)


async def test_without_tools_a_call_is_text(front: Front) -> None:
    """Red if an answer's text is taken apart although nobody offered tools."""
    front.site.script.steps = words(CALL)
    (delta,) = await answered(front, chat())
    assert (delta.text, delta.finish_reason, len(delta.tool_calls)) == (CALL, "stop", 0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [pb.Tool(name="a b")]}, "tools[0].name"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [pb.Tool(name=f"t{i}") for i in range(129)]}, "tools"),
        ({"tools": [CLOCK, pb.Tool(name="f", parameters_json="[1]")]}, "tools[1].parameters_json"),
        ({"tools": [pb.Tool(name="f", parameters_json='{"a":')]}, "tools[0].parameters_json"),
        ({"tools": [CLOCK], "required_tool": "weather"}, "required_tool"),
        ({"tools": [CLOCK], "required_tool": "clock", "tool_choice": pb.TOOL_CHOICE_REQUIRED}, "tool_choice"),
        ({"tool_choice": pb.TOOL_CHOICE_REQUIRED}, "tool_choice"),
        ({"template_kwargs_json": "{"}, "template_kwargs_json"),
    ],
)
async def test_refusals(front: Front, fields: dict[str, Any], named: str) -> None:
    """Red if tools that can't be served are dropped, or the field to blame isn't named."""
    error = await failed(front.generate(chat=chat(**fields)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named_field(error) == named


async def test_a_grammar_beside_tools(front: Front) -> None:
    """Red if one of two demands on the answer is dropped in silence."""
    error = await failed(front.generate(chat=chat(tools=[CLOCK]), grammar=pb.Grammar(regex="a")))
    assert named_field(error) == "grammar"


async def test_a_model_without_tools() -> None:
    """Red if tools are dropped because the template doesn't know them."""
    async with text_front(Site()) as front:
        error = await failed(front.generate(chat=chat(tools=[CLOCK])))
    assert named_field(error) == "tools"
