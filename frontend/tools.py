"""Tools of a chat: which are offered, whether one must be called, and the calls in the model's text.

Owns one form of calls, that of Hermes and Qwen: `<tool_call>` around a JSON object with `name` and `arguments`. A model
whose chat template doesn't show that form isn't offered tools. Any way of cutting the text into pieces gives the same
content and calls.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from frontend.openai_fields import Fields, Json, invalid, kind
from frontend.request import Grammar

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128
MAX_CALLS = 128
MAX_REQUIRED_CALLS = 8
MAX_HELD = 8
"""Whitespace before a tag that is held back, in characters; more is text."""
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
SPACING: Json = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates write it into a prompt, which is what models were trained on."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a chat says about tools."""

    offered: list[Json]
    """As templates read them."""
    must_call: bool = False
    only: str | None = None
    """The tool that must be called."""
    parallel: bool = True

    @property
    def grammar(self) -> Grammar | None:
        """What the answer follows if it must be a call."""
        if not self.must_call:
            return None
        functions = [_function(tool) for tool in self.offered]
        bodies = [function for function in functions if self.only in (None, function["name"])]
        more = f' ("\\n" call){{0,{MAX_REQUIRED_CALLS - 1}}}' if self.parallel and self.only is None else ""
        rules = [f"start: call{more}", f'call: "{OPEN_TAG}\\n" ({_names("body", len(bodies))}) "\\n{CLOSE_TAG}"']
        for index, function in enumerate(bodies):
            opening = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
            schema = json.dumps({"type": "object"} | _object(function.get("parameters")) | {"x-guidance": SPACING})
            rules += [f'body{index}: {opening} arguments{index} "}}"', f"arguments{index}: %json {schema}"]
        return Grammar("lark", "\n".join(rules), "tools")


def _names(name: str, count: int) -> str:
    return " | ".join(f"{name}{index}" for index in range(count))


def _function(tool: Json) -> Json:
    return _object(tool["function"])


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def template_calls(template: str) -> bool:
    """Whether a chat template (its source) is that of a model that calls tools in this form."""
    return OPEN_TAG in template


# ------------------------------ what a client says


def asked_tools(fields: Fields) -> Tools | None:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a body; None: no tool is offered. Raises ApiError."""
    chosen = fields.raw("tool_choice")
    if chosen == "none":
        return None
    offered = [_checked(tool, f"tools[{i}]") for i, tool in enumerate(fields.items("tools", MAX_TOOLS) or [])]
    names = [str(_function(tool)["name"]) for tool in offered]
    check_names_differ(names)
    parallel = fields.flag("parallel_tool_calls", default=True)
    if not offered and chosen in (None, "auto"):
        return None
    if not offered:
        raise invalid("tool_choice needs tools to choose from", "tool_choice")
    if chosen in (None, "auto", "required"):
        return Tools(offered, must_call=chosen == "required", parallel=parallel)
    if not isinstance(chosen, dict) or chosen.get("type") != "function":
        raise invalid("tool_choice must be none, auto, required or a function of tools", "tool_choice")
    name = _object(chosen.get("function")).get("name")
    if not isinstance(name, str) or name not in names:
        raise invalid("tool_choice names no function of tools", "tool_choice")
    return Tools(offered, must_call=True, only=name, parallel=parallel)


def _checked(tool: object, where: str) -> Json:
    if not isinstance(tool, dict):
        raise invalid(f"{where} must be an object, not {kind(tool)}", where)
    reader = Fields(tool, where)
    if reader.text("type") != "function":
        raise invalid(f"{where}.type: only tools of type function can be served", where)
    function = Fields(reader.object("function") or {}, f"{where}.function")
    check_name(function.text("name") or "", f"{where}.function.name")
    function.object("parameters")
    function.text("description")
    return tool


def check_name(name: str, where: str) -> None:
    """Raise ApiError (INVALID_ARGUMENT) for what can't be the name of a tool."""
    if not NAME.fullmatch(name):
        raise invalid(f"{where} must have 1 to 64 letters, digits, _ or -", where)


def check_names_differ(names: list[str]) -> None:
    """Raise ApiError (INVALID_ARGUMENT) for tools between which a call couldn't choose."""
    if len(set(names)) < len(names):
        raise invalid("tools has two functions of one name", "tools")


def past_calls(fields: Fields) -> list[Json]:
    """The calls of an earlier answer, `arguments` as an object where they are one: so templates read them."""
    calls: list[Json] = []
    for i, entry in enumerate(fields.items("tool_calls", MAX_CALLS) or []):
        where = f"{fields.path('tool_calls')}[{i}]"
        function = Fields(_object(_object(entry).get("function")), f"{where}.function")
        name, arguments = function.text("name"), function.text("arguments")
        if name is None or arguments is None:
            raise invalid(f"{where} must be an object with function.name and function.arguments", where)
        calls.append(past_call(Fields(_object(entry), where).text("id"), name, arguments))
    return calls


def past_call(call_id: str | None, name: str, arguments: str) -> Json:
    """One of them, as templates read it."""
    read = _decoded(arguments)
    body: Json = {"name": name, "arguments": read if isinstance(read, dict) else arguments}
    call: Json = {"type": "function", "function": body}
    return call if call_id is None else {"id": call_id, **call}


# ------------------------------ what the model says


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class Said:
    """Text and calls in a piece of an answer."""

    content: str = ""
    calls: list[Json] = field(default_factory=list)
    """As OpenAI's `tool_calls` holds them."""


class CallSplitter:
    """One sequence's text, fed piece by piece. A call comes out whole; what is none of its own kind stays text."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self.calls = 0
        self._new_id = new_id
        self._held = ""
        self._inside = False
        self._behind_call = False
        """Nothing but blanks has come since the last call."""
        self._searched = 0
        """Of the held text, inside a call: no close tag begins before."""

    def feed(self, text: str) -> Said:
        """What is certain now."""
        self._held += text
        said = Said()
        while self._take_call(said) if self._inside else self._take_content(said):
            pass
        return said

    def finish(self) -> Said:
        """What was held back when the sequence ended."""
        said, held = Said(), self._held
        self._held = ""
        if self._inside:
            self._inside = False
            self._add_call(said, held, "")
        else:
            said.content = held
        return said

    def _take_content(self, said: Said) -> bool:
        """Text up to the next call; whether there is one."""
        if self._behind_call:
            self._held = self._held.lstrip()
            self._behind_call = not self._held
        at = self._held.find(OPEN_TAG)
        end = len(self._held) - _half_tag(self._held) if at < 0 else at
        said.content += self._held[: _before_blanks(self._held, end)]
        if at < 0:
            self._held = self._held[_before_blanks(self._held, end) :]
            return False
        self._held, self._inside, self._searched = self._held[at + len(OPEN_TAG) :], True, 0
        return True

    def _take_call(self, said: Said) -> bool:
        """The call that is open, if it is complete."""
        at = self._held.find(CLOSE_TAG, self._searched)
        if at < 0:
            self._searched = max(0, len(self._held) - len(CLOSE_TAG))
            return False
        body, self._held = self._held[:at], self._held[at + len(CLOSE_TAG) :]
        self._inside, self._behind_call = False, True
        self._add_call(said, body, CLOSE_TAG)
        return True

    def _add_call(self, said: Said, body: str, closing: str) -> None:
        read = _object(_decoded(body))
        name, arguments = read.get("name"), read.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            said.content += OPEN_TAG + body + closing
            return
        written = json.dumps(arguments, ensure_ascii=False)
        call: Json = {"index": self.calls, "id": self._new_id(), "type": "function"}
        said.calls.append(call | {"function": {"name": name, "arguments": written}})
        self.calls += 1


def called(splitter: CallSplitter, text: str) -> Json:
    """`content` and `tool_calls` of a whole message."""
    first, last = splitter.feed(text), splitter.finish()
    calls = [{name: value for name, value in call.items() if name != "index"} for call in first.calls + last.calls]
    message: Json = {"content": first.content + last.content or None}
    return message | {"tool_calls": calls} if calls else message


def finish_reason(reason: str | None, splitter: CallSplitter | None) -> str | None:
    """OpenAI's word for the end of a sequence, which is another one for an answer that calls tools."""
    return "tool_calls" if reason == "stop" and splitter is not None and splitter.calls else reason


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _half_tag(text: str) -> int:
    """Length of the longest end of `text` that an open tag could begin with."""
    start = text.rfind(OPEN_TAG[0])
    return len(text) - start if start >= 0 and OPEN_TAG.startswith(text[start:]) else 0


def _before_blanks(text: str, end: int) -> int:
    """`end` moved to the front of the whitespace before it, at most MAX_HELD of it."""
    limit = max(0, end - MAX_HELD)
    while end > limit and text[end - 1].isspace():
        end -= 1
    return end
