"""Tools: what a chat may say about them, what an answer must then be, and the calls in an answer's text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine_core.ops.masks import allowed_ids
from engine_core.worker.grammar import Vocabulary, advance, mask_of
from frontend.openai_types import parse_chat
from frontend.request import Grammar
from frontend.tools import CallSplitter, Said, called, finish_reason, template_calls
from tests.unit.test_grammar import EOS, FILE, TOKENIZER, VOCAB

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"$ref": "#/$defs/town"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["town", "days"],
            "additionalProperties": False,
            "$defs": {"town": {"enum": ["Bath", "York"]}},
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, CLOCK]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Bath", "n": "é"}}\n</tool_call>'


def split(pieces: Iterator[str] | list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and (name, arguments) of a text in pieces."""
    splitter = CallSplitter(lambda: "id")
    said = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    calls: list[Any] = [call for one in said for call in one.calls]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert splitter.calls == len(calls)
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(one.content for one in said), functions


WANTED = ("weather", '{"town": "Bath", "n": "é"}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call < here", "no call < here", []),
        (CALL, "", [WANTED]),
        (f"Let me see.\n{CALL}\n{CALL}\n", "Let me see.", [WANTED, WANTED]),
        (f"{CALL} and then", "and then", [WANTED]),
        ('<tool_call>{"name": "clock"}</tool_call>', "", [("clock", "{}")]),
        (CALL.removesuffix("</tool_call>"), "", [WANTED]),
        ("<tool_call>{bad}</tool_call>", "<tool_call>{bad}</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "a", "arguments": [1]}', '<tool_call>{"name": "a", "arguments": [1]}', []),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
        ("ends in half a tag <tool_", "ends in half a tag <tool_", []),
        ("blanks stay  \n", "blanks stay  \n", []),
    ],
)
def test_calls_in_a_text(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Red when a call isn't seen, text around it is lost, or the way in which the text is cut changes the answer."""
    assert split([text]) == (content, calls)
    if len(text) < 1000:
        for size in (1, 2, 3, 5, 11):
            assert split([text[at : at + size] for at in range(0, len(text), size)]) == (content, calls), size


def test_text_before_a_call_isnt_held_back() -> None:
    """Red when a stream waits for the whole answer because tools are offered."""
    splitter = CallSplitter()
    assert splitter.feed("Let me") == Said("Let me")
    assert splitter.feed(" see <") == Said(" see")
    assert splitter.feed("b> no") == Said(" <b> no")


def test_whole_messages_and_ends() -> None:
    """Red when a whole message holds a stream's index, an empty content, or the end doesn't tell of the calls."""
    splitter = CallSplitter(lambda: "id")
    call = {"id": "id", "type": "function", "function": {"name": "weather", "arguments": WANTED[1]}}
    assert called(splitter, CALL) == {"content": None, "tool_calls": [call]}
    assert [finish_reason(reason, splitter) for reason in ("stop", "length", None)] == ["tool_calls", "length", None]
    silent = CallSplitter()
    assert called(silent, "hello") == {"content": "hello"}
    assert finish_reason("stop", silent) == finish_reason("stop", None) == "stop"
    first, second = CallSplitter(), CallSplitter()
    assert first.feed(CALL).calls[0]["id"] != second.feed(CALL).calls[0]["id"]


# ------------------------------ what must be called


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(FILE, VOCAB, [EOS])


def drawn(vocabulary: Vocabulary, grammar: Grammar | None, seed: int) -> str:
    assert grammar is not None
    assert grammar.field == "tools"
    matcher, random, ids = vocabulary.matcher(grammar.kind, grammar.text), np.random.default_rng(seed), list[int]()
    while len(ids) < 3000:
        token = int(random.choice(np.flatnonzero(allowed_ids(mask_of(matcher), VOCAB))))
        if token == EOS:
            return str(TOKENIZER.decode(ids))
        ids.append(token)
        advance(matcher, [token])
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("fields", "names", "most"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"weather"}, 1),
        ({"tool_choice": "required", "tools": [WEATHER], "parallel_tool_calls": False}, {"weather"}, 1),
        ({"tool_choice": "required", "tools": [WEATHER]}, {"weather"}, 8),
    ],
)
def test_an_answer_that_must_call(vocabulary: Vocabulary, fields: dict[str, Any], names: set[str], most: int) -> None:
    """Red when such an answer may hold text, another tool, arguments that aren't the schema's, or too many calls."""
    grammar = parse_chat(CHAT | fields).options.grammar
    counts = set()
    for seed in range(12):
        text = drawn(vocabulary, grammar, seed)
        content, calls = split([text])
        assert content == ""
        assert {name for name, _ in calls} == names
        for _, arguments in calls:
            assert f'"arguments": {arguments}}}' in text, "other blanks than templates write"
            read = json.loads(arguments)
            assert read.keys() == {"town", "days"}
            assert read["town"] in ("Bath", "York")
            assert 1 <= read["days"] <= 9
        counts.add(len(calls))
    assert max(counts) <= most
    assert most == 1 or len(counts) > 1


def test_several_tools_to_choose_from(vocabulary: Vocabulary) -> None:
    """Red when one of the tools can't be called, or a tool without parameters breaks the grammar."""
    grammar = parse_chat(CHAT | {"tool_choice": "required"}).options.grammar
    assert grammar is not None
    for call in (
        CALL.replace(', "n": "é"', ', "days": 3'),
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    ):
        matcher = vocabulary.matcher(grammar.kind, grammar.text)
        advance(matcher, Tokenizer.from_file(FILE).encode(call, add_special_tokens=False).ids)
        assert matcher.is_accepting()


# ------------------------------ what a chat says


def test_choices() -> None:
    """Red when `none` offers tools, `auto` binds the answer, or the template isn't given what was offered."""
    auto = parse_chat(CHAT)
    assert auto.tools is not None
    assert auto.options.grammar is None
    assert auto.chat.tools == [WEATHER, CLOCK]
    off = parse_chat(CHAT | {"tool_choice": "none"})
    assert (off.tools, off.chat.tools) == (None, [])
    assert parse_chat({"messages": CHAT["messages"], "tools": [], "tool_choice": "auto"}).tools is None


def test_earlier_calls_reach_the_template() -> None:
    """Red when the arguments of an earlier call aren't an object for the template, or a tool's answer loses its id."""
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "x"}'}}
    broken = {"type": "function", "function": {"name": "clock", "arguments": "{"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    chat = parse_chat({"messages": messages, "tools": [CLOCK]}).chat
    assert chat.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "x"}}},
            broken,
        ],
    }
    assert chat.messages[2] == {"role": "tool", "content": "noon", "tool_call_id": "call_1"}


def test_templates_that_call() -> None:
    """Red when a model whose template shows no `<tool_call>` is offered tools."""
    assert template_calls("{% if tools %}<tool_call>{% endif %}")
    assert not template_calls("{{ messages }}")
