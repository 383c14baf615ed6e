"""Renders a chat into the prompt that the model was trained with, by the template of its folder.

Owns where templates are found and what they are given. Takes no template from a client. A client's own values reach the
template as plain data under their own names and can't replace what the server provides.

The template is code from the model folder: it runs sandboxed, in a process that is killed when it takes too long and
that can't take more than its memory (`template_process.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from frontend.config import ConfigError
from frontend.request import ApiError, Code
from frontend.template_process import Renderer, RenderFailed, Rendering
from frontend.template_sandbox import check_source
from frontend.tokenizer import MAX_CONFIG_BYTES, NAMED_TOKENS, read_config

MAX_MESSAGES = 65_536
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
        self.for_tools = source if tool_source is None else tool_source
        """What renders chats with tools."""
        self._named_tokens = dict(named_tokens)
        self._now = now
        sources = [source] if tool_source is None else [source, tool_source]
        try:
            for one in sources:
                check_source(one)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the model's chat template is malformed: {error}") from error
        self._renderer = Renderer(sources)
        self._for_tools = len(sources) - 1

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

    def prepare(self) -> None:
        """Start what renders, so that the first chat needn't wait for it. Raises ConfigError."""
        try:
            self._renderer.prepare()
        except RenderFailed as error:
            raise ConfigError(str(error)) from error

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
        rendering = Rendering(self._for_tools if tools else 0, variables, self._now().isoformat())
        try:
            return await self._renderer.render(rendering)
        except RenderFailed as error:
            raise ApiError(Code.INVALID_ARGUMENT, str(error), "messages") from error


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
