"""Tools in the text gRPC contract: what a chat offers, earlier calls as templates read them, calls in an answer.

Owns the mapping of the messages; what a call is and how one is forced is `tools.py`'s.
"""

from __future__ import annotations

from greenlane.text.v1 import text_pb2

from frontend.openai_fields import Json, decode_object, invalid
from frontend.request import Delta
from frontend.tools import (
    MAX_CALLS,
    MAX_TOOLS,
    CallSplitter,
    Tools,
    check_name,
    check_names_differ,
    finish_reason,
    past_call,
)
from frontend.wire import cap

REQUIRED = text_pb2.TOOL_CHOICE_REQUIRED


def asked_tools(chat: text_pb2.Chat) -> Tools | None:
    """What a chat says about tools; None: none is offered. Raises ApiError (INVALID_ARGUMENT)."""
    if chat.tool_choice == text_pb2.TOOL_CHOICE_NONE:
        return None
    cap("tools", len(chat.tools), MAX_TOOLS)
    offered = [_template_tool(tool, f"tools[{i}]") for i, tool in enumerate(chat.tools)]
    names = [tool.name for tool in chat.tools]
    check_names_differ(names)
    only = chat.required_tool if chat.HasField("required_tool") else None
    if only is not None and chat.HasField("tool_choice"):
        raise invalid("required_tool and tool_choice exclude each other", "tool_choice")
    if only is not None and only not in names:
        raise invalid("required_tool names none of tools", "required_tool")
    must_call = only is not None or chat.tool_choice == REQUIRED
    if must_call and not offered:
        raise invalid("tool_choice needs tools to choose from", "tool_choice")
    parallel = not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls
    return Tools(offered, must_call=must_call, only=only, parallel=parallel) if offered else None


def _template_tool(tool: text_pb2.Tool, where: str) -> Json:
    check_name(tool.name, f"{where}.name")
    function: Json = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters_json"):
        field = f"{where}.parameters_json"
        function["parameters"] = decode_object(tool.parameters_json.encode(), field)
    return {"type": "function", "function": function}


def template_message(message: text_pb2.Message, where: str) -> Json:
    """A message with the keys that templates read."""
    read: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        cap(f"{where}.tool_calls", len(message.tool_calls), MAX_CALLS)
        read["tool_calls"] = [past_call(call.id or None, call.name, call.arguments_json) for call in message.tool_calls]
    if message.HasField("tool_call_id"):
        read["tool_call_id"] = message.tool_call_id
    return read


class CallSeparator:
    """Takes calls out of the deltas of all the sequences of one answer."""

    def __init__(self, sequences: int) -> None:
        self._splitters = [CallSplitter() for _ in range(sequences)]

    def take(self, delta: Delta) -> list[text_pb2.ToolCall]:
        """The calls that are complete with this delta; its text is what is certain to be text now."""
        splitter = self._splitters[delta.index]
        said = splitter.feed(delta.text)
        delta.text, calls = said.content, said.calls
        if delta.finish_reason is not None:
            last = splitter.finish()
            delta.text, calls = delta.text + last.content, calls + last.calls
            delta.finish_reason = finish_reason(delta.finish_reason, splitter)
        return list(map(_call, calls))


def _call(call: Json) -> text_pb2.ToolCall:
    function = call["function"]
    assert isinstance(function, dict)
    return text_pb2.ToolCall(id=str(call["id"]), name=function["name"], arguments_json=function["arguments"])
