"""Bodies of the OpenAI-style endpoints: what is taken, what is refused, and by which name."""

from __future__ import annotations

import contextlib
import gc
import json
from typing import Any

import pytest

from frontend.openai_fields import MAX_JSON_ITEMS, decode_object
from frontend.openai_types import MAX_PROMPTS, parse_chat, parse_completion, parse_detokenize, parse_tokenize
from frontend.request import ApiError, Code, Grammar, Sampling

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def refused(parse: Any, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(decode_object(json.dumps(body).encode()))
    assert caught.value.code is Code.INVALID_ARGUMENT
    return caught.value


def test_every_sampling_field_arrives() -> None:
    """Red if a field is lost or lands in another one."""
    body = parse_completion(
        {
            "prompt": "x",
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 7,
            "min_p": 0.125,
            "seed": 2**64 - 1,
            "repetition_penalty": 1.5,
            "presence_penalty": -1,
            "frequency_penalty": 2.0,
            "logit_bias": {"5": -100, "17": 1.5},
            "max_tokens": 9,
            "min_tokens": 3,
            "stop_token_ids": [4, 6],
            "ignore_eos": True,
            "n": 2,
            "best_of": 2,
            "logprobs": 4,
            "prompt_logprobs": 1,
            "priority": -3,
            "cache_salt": "tenant",
            "stop": ["a", "b"],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "return_token_ids": True,
            "unknown_field": {"of": "any kind"},
        }
    )
    assert body.options.sampling == Sampling(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias={5: -100.0, 17: 1.5},
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=(4, 6),
        ignore_eos=True,
        n=2,
        logprobs=4,
        prompt_logprobs=1,
    )
    options = body.options
    assert (options.priority, options.cache_salt, options.stop, options.include_stop) == (
        -3,
        "tenant",
        ("a", "b"),
        True,
    )
    assert (options.skip_special_tokens, options.add_special_tokens, options.return_token_ids) == (False, False, True)


def test_absent_and_null_are_the_same() -> None:
    """Red if a null is taken for a value, or a default changes."""
    plain = parse_completion({"prompt": "x"})
    names = ("temperature", "seed", "stop", "logit_bias", "n", "logprobs", "stream", "stream_options", "suffix", "user")
    assert parse_completion({"prompt": "x", **dict.fromkeys(names)}) == plain
    assert plain.options.sampling == Sampling(max_tokens=16)
    assert (plain.options.stream, plain.options.skip_special_tokens, plain.options.add_special_tokens) == (
        False,
        True,
        True,
    )
    chat = parse_chat(CHAT)
    assert chat.options.sampling == Sampling()
    assert (chat.options.add_special_tokens, chat.chat.add_generation_prompt) == (False, True)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("text", ["text"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([[]], [[]])],
)
def test_every_form_of_a_prompt(prompt: object, parsed: object) -> None:
    """Red if one of OpenAI's four forms of a prompt is read as another."""
    assert parse_completion({"prompt": prompt}).prompts == parsed


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, 1.0]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 128}, "prompt"),
        ({"model": 3}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 10**20}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 10**20}, "seed"),
        ({"seed": "100"}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": []}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"stop_token_ids": 7}, "stop_token_ids"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**31): 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"echo": 1}, "echo"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"user": 3}, "user"),
        ({"metadata": "x"}, "metadata"),
        ({"suffix": "end"}, "suffix"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"tools": [TOOL]}, "tools"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["yes", 3]}, "guided_choice"),
        ({"guided_choice": ["yes", ""]}, "guided_choice"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": "text"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
    ],
)
def test_refused_completions(fields: dict[str, Any], parameter: str) -> None:
    """Red if a wrong value gets through, or the refusal blames another field."""
    assert refused(parse_completion, {"prompt": "x"} | fields).parameter == parameter


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "guided_json": None, "guided_choice": None}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", '{"type":"object"}', "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"b": [1]}}}},
            ("json_schema", '{"b":[1]}', "response_format"),
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
            ("structural_tag", '{"type":"structural_tag","structures":[],"triggers":[]}', "response_format"),
        ),
        ({"guided_json": {}}, ("json_schema", "{}", "guided_json")),
        ({"guided_json": '{"a": 1}'}, ("json_schema", '{"a": 1}', "guided_json")),
        ({"guided_regex": "a+"}, ("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", 'b"']}, ("choice", '["a","b\\""]', "guided_choice")),
        ({"guided_grammar": "start: /a/"}, ("lark", "start: /a/", "guided_grammar")),
        ({"structured_outputs": {"json": {"b": 1}}}, ("json_schema", '{"b":1}', "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a", "json_object": False}}, ("regex", "a", "structured_outputs.regex")),
        (
            {"structured_outputs": {"json_object": True}},
            ("json_schema", '{"type":"object"}', "structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            ("structural_tag", "{}", "structured_outputs.structural_tag"),
        ),
    ],
)
def test_grammars(fields: dict[str, Any], grammar: tuple[str, str, str] | None) -> None:
    """Red if one of the names for a constraint is ignored, read as another kind, or blamed under another name."""
    for options in (
        parse_completion({"prompt": "x"} | fields).options,
        parse_chat(CHAT | fields).options,
    ):
        assert options.grammar == (None if grammar is None else Grammar(*grammar))


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom"}], "tool_choice": "auto"}, "tools[0]"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": "5", "max_completion_tokens": 3}, "max_tokens"),
    ],
)
def test_refused_chats(fields: dict[str, Any], parameter: str) -> None:
    """Red if a wrong value gets through, or the refusal blames another field."""
    assert refused(parse_chat, CHAT | fields).parameter == parameter


def test_chat_fields() -> None:
    """Red if parts aren't joined, foreign keys of a message reach the template, or a limit's newer name loses."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": "ann", "__class__": "x"}
    body = parse_chat(
        {
            "messages": [message],
            "max_tokens": 3,
            "max_completion_tokens": 5,
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [{"type": "function"}],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    assert body.chat.messages == [{"role": "user", "content": "a\nb", "name": "ann"}]
    assert (body.options.sampling.max_tokens, body.options.sampling.logprobs, body.logprobs) == (5, 2, True)
    assert body.chat.template_kwargs == {"enable_thinking": False}


def test_echo_asks_for_what_it_shows() -> None:
    """Red if echoed logprobs aren't computed, or scoring without an answer becomes impossible."""
    body = parse_completion({"prompt": "x", "echo": True, "logprobs": 2, "max_tokens": 0})
    assert (body.options.sampling.prompt_logprobs, body.options.sampling.max_tokens, body.generate) == (2, 1, False)
    assert not body.options.prompt_logprobs
    assert parse_completion({"prompt": "x", "echo": True}).options.sampling.prompt_logprobs is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b'{"prompt": "x"',
        b'{"prompt": "x"} trailing',
        b"[]",
        b"null",
        b'"text"',
        b"{'prompt': 'x'}",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": [' + b"1," * MAX_JSON_ITEMS + b"1]}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_malformed_bodies(body: bytes) -> None:
    """Red if a body that is no JSON object becomes anything but an INVALID_ARGUMENT."""
    with pytest.raises(ApiError) as caught:
        decode_object(body)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert len(caught.value.message) < 200


def test_tokenize_and_detokenize_bodies() -> None:
    """Red if a text is tokenized without its special tokens, or a chat with them twice."""
    text, chat = parse_tokenize({"prompt": "x"}), parse_tokenize(CHAT)
    assert (text.input, text.add_special_tokens, chat.add_special_tokens) == ("x", True, False)
    assert refused(parse_tokenize, {}).parameter == "prompt"
    assert refused(parse_tokenize, {"prompt": "x"} | CHAT).parameter == "prompt"
    assert parse_detokenize({"tokens": [1, 2]}).ids == [1, 2]
    assert refused(parse_detokenize, {}).parameter == "tokens"
    assert refused(parse_detokenize, {"tokens": [1.5]}).parameter == "tokens[0]"


@pytest.mark.parametrize("body", [b'{"prompt": [' + b"[5]," * 200_000 + b"[5]]}", b'{"prompt": [' + b"[5]," * 200_000])
def test_large_bodies_are_decoded_without_collecting(body: bytes) -> None:
    """Red if the garbage collector visits a body's lists while they arrive, or stays off afterwards."""

    def collections() -> int:
        return sum(generation["collections"] for generation in gc.get_stats())

    before = collections()
    with contextlib.suppress(ApiError):
        decode_object(body)
    assert collections() - before <= 1
    assert gc.isenabled()
