"""Renders a chat into the prompt that the model was trained with, by the template of its folder.

Owns the Jinja environment, set up as transformers sets it up (templates are written against that), and the bounds.
Takes no template from a client. A client's own values reach the template as plain data under their own names and can't
replace what the server provides.

The template is code from the model folder, so it runs sandboxed, in a worker thread, and within bounds: lines executed,
characters written, length of a repeated string. What remains: a single built-in call that is slow or large by itself
(say `"%999999999d" % 1`) isn't interrupted; it occupies one thread and its memory, never the event loop.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontend.config import ConfigError
from frontend.request import ApiError, Code
from frontend.tokenizer import MAX_CONFIG_BYTES, NAMED_TOKENS, read_config

MAX_TEMPLATE_LINES = 2_000_000
"""Template lines executed per rendering (about half a second); a chat of 1,000 messages takes some 50,000."""
MAX_RENDERED_CHARS = 16 << 20
MAX_MESSAGES = 65_536
TEMPLATE_FILE = "<chat template>"
RESERVED = frozenset(
    (
        *NAMED_TOKENS,
        "additional_special_tokens",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "tokenizer",
        "raise_exception",
        "strftime_now",
        "namespace",
        "dict",
        "range",
        "cycler",
        "joiner",
        "lipsum",
        "self",
        "loop",
        "caller",
        "varargs",
        "kwargs",
    )
)
"""Names that a client's template arguments can't use."""

TraceFunction = Callable[[FrameType, str, Any], Any]


class TemplateBoundExceeded(Exception):
    """The template ran or wrote beyond a bound."""


class ChatTemplate:
    """A compiled chat template with the model's named special tokens."""

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str],
        tool_source: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tool_source`: a template of its own for chats with tools. Raises ConfigError for a malformed template."""
        self.source = source
        self._named_tokens = dict(named_tokens)
        environment = _environment(now)
        try:
            self._template = _compile(environment, source)
            self._tool_template = self._template if tool_source is None else _compile(environment, tool_source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the model's chat template is malformed: {error}") from error

    @classmethod
    def load(cls, folder: Path | str, named_tokens: Mapping[str, str]) -> ChatTemplate:
        """chat_template.jinja, else tokenizer_config.json's `chat_template`.

        Raises ConfigError where the folder has none, saying what to do.
        """
        sources = _sources(Path(folder))
        default = sources.get("default")
        if default is None:
            raise ConfigError(
                f"{folder} has no chat template; add chat_template.jinja (or `chat_template` in "
                "tokenizer_config.json), or use completions, which need none"
            )
        return cls(default, named_tokens, sources.get("tool_use"))

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat. `arguments` are the client's own values for the template (`enable_thinking` …).

        Messages, tools and arguments are JSON data. Raises ApiError (INVALID_ARGUMENT) for a chat that the template
        refuses, an argument with a reserved name and a rendering beyond the bounds.
        """
        if not messages:
            raise ApiError(Code.INVALID_ARGUMENT, "messages is empty; send at least one", "messages")
        if len(messages) > MAX_MESSAGES:
            raise ApiError(Code.INVALID_ARGUMENT, f"messages has more than {MAX_MESSAGES} entries", "messages")
        variables: dict[str, Any] = dict(arguments or {})
        taken = sorted(RESERVED.intersection(variables))
        if taken:
            raise ApiError(
                Code.INVALID_ARGUMENT,
                f"{taken[0]!r} is reserved; it can't be a template argument",
                "chat_template_kwargs",
            )
        variables.update(self._named_tokens)
        variables.update(messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt)
        template = self._tool_template if tools else self._template
        try:
            return await asyncio.to_thread(_render, template, variables)
        except TemplateBoundExceeded as error:
            raise ApiError(Code.INVALID_ARGUMENT, f"the chat can't be rendered: {error}", "messages") from None
        except jinja2.TemplateError as error:
            raise ApiError(
                Code.INVALID_ARGUMENT, f"the model's chat template refuses this chat: {error}", "messages"
            ) from error
        except Exception as error:  # a template may fail with anything, e.g. None + str
            raise ApiError(
                Code.INVALID_ARGUMENT,
                f"the model's chat template failed on this chat ({type(error).__name__}); check roles and contents",
                "messages",
            ) from error


# ------------------------------ where templates are


def _sources(folder: Path) -> dict[str, str]:
    """Templates by name; the unnamed one is `default`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes; this is no chat template")
            return {"default": path.read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
    value = read_config(folder).get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    named = value if isinstance(value, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in named
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }


# ------------------------------ the environment


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with operators bounded that could make a huge value in one step."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and max(abs(left), abs(right)) > 1024:
            raise TemplateBoundExceeded("the template raises a number to a huge power")
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, (str, list, tuple)) and len(items) * times > MAX_RENDERED_CHARS:
                    raise TemplateBoundExceeded("the template repeats a value too often")
        return super().call_binop(context, operator, left, right)


class _Dict:
    """`dict(…)` in templates, without the type object itself."""

    def __call__(self, *pairs: Any, **items: Any) -> dict[Any, Any]:
        return dict(*pairs, **items)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(…)` in templates, without names that mean something to Python."""

    def __init__(*args: Any, **items: Any) -> None:
        self, *pairs = args  # so that `self` may be an item
        attributes = dict(*pairs, **items)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} can't be set on a namespace: it begins with an underscore")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escaping, with the options that templates use."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compile(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    """Compile under a file name of our own, by which the line counter knows the template's frames."""
    code = environment.compile(source, filename=TEMPLATE_FILE)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


# ------------------------------ bounded rendering, in a worker thread


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    before = sys.gettrace()
    sys.settrace(_line_counter())
    try:
        return _joined(template, variables)
    finally:
        sys.settrace(before)


def _joined(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise TemplateBoundExceeded(f"the prompt would be longer than {MAX_RENDERED_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _line_counter() -> TraceFunction:
    """A trace function that ends a template after MAX_TEMPLATE_LINES lines; other code runs untraced.

    A thread can't be stopped from outside, and a loop that writes nothing returns to no code of ours.
    """
    left = MAX_TEMPLATE_LINES

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TemplateBoundExceeded(f"the template ran more than {MAX_TEMPLATE_LINES} lines")
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename == TEMPLATE_FILE else None

    return call
