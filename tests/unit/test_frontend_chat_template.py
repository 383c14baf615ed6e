"""Chat templates: rendered as transformers renders them, within bounds, with nothing of the server's replaced."""

from __future__ import annotations

import asyncio
import gc
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from frontend import template_process
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


NESTED = "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}"

RUNAWAYS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(9999) %}{{ 'some text' }}{% endfor %}{% endfor %}",
    "{% macro again(n) %}{{ again(n + 1) }}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ ([1] * 10**5) * 10**5 }}",
    "{{ 9**(9**9) }}",
    "{% set ns = namespace(t='a' * 1000000) %}{% for i in range(30) %}{{ ns.t }}{% endfor %}",
    "{% set ns = namespace(t='ab') %}{% for i in range(40) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "{% set ns = namespace(t='ab') %}{% for i in range(40) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "{% set ns = namespace(n=7) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{{ '%999999999999d' % 1 }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ 'a'.ljust(10**11) }}",
    "{{ 'a'|center(10**11) }}",
    "{{ 'a'|center(99999999999) }}",
    "{{ ('a\n' * 10000)|indent(10**8) }}",
    "{{ '%99999999999d'|format(1) }}",
    "{{ [1]|batch(10**11, 0)|list }}",
    "{{ [1]|slice(10**11)|list|length }}",
    "{{ 1.5|round(10**10, 'ceil') }}",
    "{{ lipsum(n=10**7) }}",
    "{{ ('a' * 10000)|wordwrap(1, wrapstring='b' * 1000000) }}",
    NESTED + "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    NESTED + "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a|tojson }}",
]


@pytest.mark.parametrize("source", RUNAWAYS)
async def test_a_runaway_template_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a template can run, write or allocate without bound."""
    monkeypatch.setattr(template_process, "RENDER_S", 0.5)
    with pytest.raises(ApiError) as refused:
        await ChatTemplate(source, {}).render(MESSAGES)
    assert refused.value.code is Code.INVALID_ARGUMENT


async def test_the_chat_after_a_runaway_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if the child that was killed, or ran out of memory, isn't replaced."""
    hostile = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages[0].run %}" + hostile + "{% endif %}{{ 'a' * messages[0].size }}", {})
    assert await template.render([{"size": 1}]) == "a"
    monkeypatch.setattr(template_process, "RENDER_S", 0.5)
    with pytest.raises(ApiError, match=r"longer than 0\.5 s"):
        await template.render([{"run": True}])
    monkeypatch.undo()
    with pytest.raises(ApiError, match="MemoryError"):
        await template.render([{"size": 10**12}])
    assert await template.render([{"size": 2}]) == "aa"


async def test_a_child_that_stands_still_costs_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a chat is refused because the process that renders it was stopped, or if that process is kept."""
    before = set(psutil.Process().children())
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert await template.render([{"content": "x"}]) == "x"
    (child,) = set(psutil.Process().children()) - before
    child.suspend()
    monkeypatch.setattr(template_process, "RENDER_S", 0.5)
    assert await template.render([{"content": "y"}]) == "y"
    assert not child.is_running()


async def test_the_event_loop_runs_while_a_template_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a built-in call of a template holds this process's interpreter."""
    monkeypatch.setattr(template_process, "RENDER_S", 0.5)
    rendering = asyncio.create_task(ChatTemplate(RUNAWAYS[-2], {}).render(MESSAGES))
    turns = 0
    while not rendering.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100
    with pytest.raises(ApiError):
        await rendering


async def test_a_rendering_that_nobody_waits_for_disturbs_no_other() -> None:
    """Red if a cancelled chat leaves its answer behind for the next one."""
    template = ChatTemplate("{% for i in range(20000) %}{% endfor %}{{ messages[0].content }}", {})
    for turn in range(5):
        given_up = asyncio.create_task(template.render([{"content": f"given up {turn}"}]))
        await asyncio.sleep(0.002)
        given_up.cancel()
        chats = [template.render([{"content": f"{turn}.{chat}"}]) for chat in range(3)]
        assert await asyncio.gather(*chats) == [f"{turn}.{chat}" for chat in range(3)]


async def test_the_process_goes_with_its_template() -> None:
    """Red if dropped templates leave processes behind, or a chat pays for one that was killed before it came."""
    before = set(psutil.Process().children())
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert await template.render([{"content": "x"}]) == "x"
    (child,) = set(psutil.Process().children()) - before
    child.kill()
    gone, _ = psutil.wait_procs([child], 10)
    assert gone == [child]
    assert await template.render([{"content": "z"}]) == "z"
    del template
    gc.collect()
    assert set(psutil.Process().children()) <= before


async def test_a_process_that_dies_over_a_chat_fails_that_chat_alone() -> None:
    """Red if a chat waits out its deadline for a process that is gone, pays for a death that had another reason, kills
    more than two, or leaves the next one without."""
    before = set(psutil.Process().children())
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{{ messages[0].content }}{% if messages[0].run %}" + endless + "{% endif %}", {})
    template.prepare()
    rendering = asyncio.create_task(template.render([{"run": True}]))
    killed: set[psutil.Process] = set()
    for _ in range(2):
        await asyncio.sleep(0.1)
        while not (fresh := set(psutil.Process().children()) - before - killed):
            assert not rendering.done(), "the first death was the chat's end"
            await asyncio.sleep(0.01)
        for child in fresh:
            child.kill()
        killed |= fresh
    with pytest.raises(ApiError, match=r"template ended|doesn't start"):
        await rendering
    assert await template.render([{"content": "x"}]) == "x"


@pytest.mark.parametrize("source", ["{{ 1|unheard_of }}", "{{ 1 is unheard_of }}"])
def test_unknown_names_are_refused_at_start_and_nothing_is_computed(source: str) -> None:
    """Red if a template that can't be rendered waits for the first chat, or its constants are computed here."""
    with pytest.raises(ConfigError, match="unheard_of"):
        ChatTemplate("{{ '%999999999999d' % 1 }}{{ 'a'|center(99999999999) }}" + source, {})


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
