"""Chat templates: rendered as transformers renders them, within bounds, with nothing of the server's replaced."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from frontend import chat_template as module
from frontend.chat_template import RESERVED, ChatTemplate
from frontend.config import ConfigError
from frontend.request import ApiError, Code
from tests.unit.scripted_engine import FIXTURE

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'exact'."},
    {"role": "user", "content": '日本 "quoted"\n\n  indented'},
    {"role": "assistant", "content": "fine"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": ["é", 1, None, True]}}}]

QWEN_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {{- '<|im_start|>' + message.role + '\\n' + content.split('</think>')[-1].lstrip('\\n') + eos_token }}
    {%- generation %}[{{ loop.index0 > ns.last }}]{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA_LIKE = """{{ bos_token }}
{% for m in messages %}
    {% if m['role'] == 'system' %}
<<SYS>>{{ m['content'] | trim }}<</SYS>>
    {% else %}
{{ m['role'] ~ ': ' ~ m['content'] }}{# comment #}
    {% endif %}
{% endfor %}
{{ messages | tojson(indent=2) }} {{ dict(a=1) | tojson }} {{ dict.fromkeys(['k'], namespace(self=2).self) }}
"""


@pytest.mark.parametrize("source", [QWEN_LIKE, LLAMA_LIKE, (FIXTURE / "chat_template.jinja").read_text()])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
async def test_renders_as_transformers_does(
    source: str, tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
) -> None:
    """Red if whitespace control, filters, tags or variables differ from what templates are written against."""
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, **names, **arguments}
    expected = render_jinja_template([MESSAGES], chat_template=source, **options)[0][0]
    assert await ChatTemplate(source, names).render(MESSAGES, tools, True, arguments) == expected


async def test_the_fixtures_template() -> None:
    """Red if chat_template.jinja isn't found or add_generation_prompt is ignored."""
    template = ChatTemplate.load(FIXTURE, {})
    chat = [{"role": "user", "content": "hi"}]
    assert await template.render(chat) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert await template.render(chat, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    "value",
    ["plain", [{"name": "other", "template": "no"}, {"name": "default", "template": "plain"}]],
    ids=["a string", "a named list"],
)
async def test_templates_of_the_tokenizer_config(tmp_path: Path, value: Any) -> None:
    """Red if either spelling of older folders isn't read."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    assert await ChatTemplate.load(tmp_path, {}).render(MESSAGES) == "plain"


async def test_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    """Red if the named template `tool_use` is ignored for chats with tools, or used for the others."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path, {})
    assert await template.render(MESSAGES) == "plain"
    assert await template.render(MESSAGES, TOOLS) == "tools"


@pytest.mark.parametrize("config", [{}, {"chat_template": []}, {"chat_template": [{"name": "x", "template": "y"}]}])
def test_a_folder_without_a_template_says_what_to_do(tmp_path: Path, config: dict[str, Any]) -> None:
    """Red if a missing template is anything but a clear refusal."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"add chat_template\.jinja"):
        ChatTemplate.load(tmp_path, {})


def test_a_malformed_template_is_refused_at_start() -> None:
    """Red if a syntax error waits for the first chat."""
    with pytest.raises(ConfigError, match="malformed"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize("name", sorted(RESERVED))
async def test_reserved_names_cant_be_arguments(name: str) -> None:
    """Red if a client's argument replaces what the server or the environment provides."""
    with pytest.raises(ApiError) as refused:
        await ChatTemplate("{{ messages }}", {}).render(MESSAGES, arguments={name: "mine"})
    assert (refused.value.code, refused.value.parameter) == (Code.INVALID_ARGUMENT, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ None + 'a' }}", "TypeError"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].__init__.__globals__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "underscore"),
        ("{{ namespace(__init__=1) }}", "underscore"),
        ("{{ dict.__class__.mro }}", "unsafe"),
        ("{{ undefined_thing.field }}", "undefined"),
        ("{% include 'other' %}", "failed"),
    ],
)
async def test_what_a_template_refuses_or_may_not_do(source: str, says: str) -> None:
    """Red if a template's error is a 500, or the sandbox lets Python's insides through."""
    with pytest.raises(ApiError) as refused:
        await ChatTemplate(source, {}).render(MESSAGES)
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert says in refused.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(9999) %}{{ 'some text' }}{% endfor %}{% endfor %}",
        "{% macro again(n) %}{{ again(n + 1) }}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ ([1] * 10**5) * 10**5 }}",
        "{{ 9**9**9 }}",
        "{% set ns = namespace(t='a' * 1000000) %}{% for i in range(30) %}{{ ns.t }}{% endfor %}",
    ],
)
async def test_a_runaway_template_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a template can run, write or allocate without bound; the event loop goes on meanwhile."""
    monkeypatch.setattr(module, "MAX_TEMPLATE_LINES", 200_000)
    template = ChatTemplate(source, {})
    with pytest.raises(ApiError) as refused:
        await template.render(MESSAGES)
    assert refused.value.code is Code.INVALID_ARGUMENT


async def test_the_event_loop_runs_while_a_template_does() -> None:
    """Red if rendering happens on the event loop's thread."""
    template = ChatTemplate("{% for i in range(99999) %}{% for j in range(99) %}{% endfor %}{% endfor %}", {})
    rendering = asyncio.create_task(template.render(MESSAGES))
    turns = 0
    while not rendering.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    with pytest.raises(ApiError):
        await rendering


def test_the_threads_trace_function_is_restored() -> None:
    """Red if a rendering leaves its line counter on a pooled thread, slowing and ending what runs there next."""
    template = ChatTemplate("{{ raise_exception('x') }}", {})
    before = sys.gettrace()
    with pytest.raises(ApiError):
        asyncio.run(template.render(MESSAGES))
    assert sys.gettrace() is before


@pytest.mark.parametrize("messages", [[], [{}] * 65_537])
async def test_the_number_of_messages_is_bounded(messages: list[dict[str, Any]]) -> None:
    """Red if an empty chat reaches the template, or a huge one."""
    with pytest.raises(ApiError) as refused:
        await ChatTemplate("x", {}).render(messages)
    assert refused.value.parameter == "messages"


async def test_now_is_the_clocks() -> None:
    """Red if strftime_now reads the machine's time behind the injected one."""
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2031, 7, 4))
    assert await template.render(MESSAGES) == "04 Jul 2031"
