"""Splits the answer of a model that thinks into its reasoning and its content, wherever the pieces of text break.

Owns the tags and the rule: an answer that starts with `<think>` (or whose prompt already ends with it) is reasoning
up to `</think>`, the rest is content; newlines beside the tags belong to neither. An answer that starts otherwise is
content throughout. Changes nothing else, and any way of cutting the text into pieces gives the same two parts.
"""

from __future__ import annotations

import enum

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"
MAX_HELD = 8
"""Whitespace before the open tag and newlines before the close tag that are held back, in characters; more is text."""


def template_thinks(template: str) -> bool:
    """Whether a chat template (its source) is that of a model that marks its reasoning with think tags."""
    return CLOSE_TAG in template


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside an open think tag, so that the answer starts with reasoning."""
    return prompt.rstrip().endswith(OPEN_TAG)


class _State(enum.Enum):
    START = enum.auto()
    OPENED = enum.auto()
    REASONING = enum.auto()
    CLOSED = enum.auto()
    CONTENT = enum.auto()


class ReasoningSplitter:
    """One sequence's text, fed piece by piece. What can't be told yet is held back: whitespace and half a tag."""

    def __init__(self, opened: bool) -> None:
        self._state = _State.OPENED if opened else _State.START
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """The new (reasoning, content); either may be empty."""
        self._held += text
        if self._state is _State.START:
            self._start()
        reasoning = self._reasoning() if self._state in (_State.OPENED, _State.REASONING) else ""
        if self._state is _State.CLOSED:
            self._held = self._held.lstrip("\n")
            self._state = _State.CONTENT if self._held else _State.CLOSED
        if self._state is not _State.CONTENT:
            return reasoning, ""
        content, self._held = self._held, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """What was held back when the sequence ended, as (reasoning, content)."""
        held, self._held = self._held, ""
        return (held, "") if self._state is _State.REASONING else ("", held)

    def _start(self) -> None:
        text = self._held.lstrip()
        if len(self._held) - len(text) <= MAX_HELD:
            if text.startswith(OPEN_TAG):
                self._held, self._state = text[len(OPEN_TAG) :], _State.OPENED
                return
            if OPEN_TAG.startswith(text):
                return
        self._state = _State.CONTENT

    def _reasoning(self) -> str:
        """Takes the reasoning that is certain out of the held text."""
        if self._state is _State.OPENED:
            self._held = self._held.lstrip("\n")
            if not self._held:
                return ""
            self._state = _State.REASONING
        at = self._held.find(CLOSE_TAG)
        if at >= 0:
            text = self._held[: _before_newlines(self._held, at)]
            self._held, self._state = self._held[at + len(CLOSE_TAG) :], _State.CLOSED
            return text
        end = _before_newlines(self._held, len(self._held) - _half_tag(self._held))
        text, self._held = self._held[:end], self._held[end:]
        return text


def _half_tag(text: str) -> int:
    """Length of the longest end of `text` that a close tag could begin with."""
    start = text.rfind(CLOSE_TAG[0])
    return len(text) - start if start >= 0 and CLOSE_TAG.startswith(text[start:]) else 0


def _before_newlines(text: str, end: int) -> int:
    """`end` moved to the front of the newlines before it, at most MAX_HELD of them."""
    limit = max(0, end - MAX_HELD)
    while end > limit and text[end - 1] == "\n":
        end -= 1
    return end
