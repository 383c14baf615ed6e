"""The reasoning splitter: the rule on whole texts, and the same result for every way of cutting them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.reasoning import MAX_HELD, ReasoningSplitter, opens_thinking, template_thinks

PIECES = st.sampled_from(
    ["<think>", "</think>", "<", "</", "think>", "\n", "\n\n", " ", "a", "b c", "é", "</thin", "<t"]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def split(opened: bool, *pieces: str) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (False, "<think>\nwhy\n</think>\n\nYes", "why", "Yes"),
        (False, "\n<think>why</think>Yes", "why", "Yes"),
        (False, "<think>\n\n</think>\n\nYes", "", "Yes"),
        (False, "Yes", "", "Yes"),
        (False, "  Yes", "", "  Yes"),
        (False, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (False, "<thin", "", "<thin"),
        (False, "   ", "", "   "),
        (False, " " * (MAX_HELD + 1) + "<think>a</think>", "", " " * (MAX_HELD + 1) + "<think>a</think>"),
        (False, "<think>why\n\n", "why\n\n", ""),
        (False, "<think>a < b </thin", "a < b </thin", ""),
        (False, "<think>a</think>b</think>c", "a", "b</think>c"),
        (True, "why</think>\nYes", "why", "Yes"),
        (True, "\n\nwhy", "why", ""),
        (True, "</think>Yes", "", "Yes"),
        (True, "a" + "\n" * (MAX_HELD + 2) + "</think>", "a\n\n", ""),
        (True, "a\n \n</think>\n b", "a\n ", " b"),
    ],
)
def test_rule(opened: bool, text: str, reasoning: str, content: str) -> None:
    """Red if the rule of the module changes."""
    assert split(opened, text) == (reasoning, content)


@given(TEXTS, st.booleans(), st.data())
def test_any_cut_gives_the_same(text: str, opened: bool, data: st.DataObject) -> None:
    """Red if what is held back depends on where tokens break."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(opened, *pieces) == split(opened, text) == split(opened, *text)


@given(TEXTS, st.booleans())
def test_nothing_else_is_lost(text: str, opened: bool) -> None:
    """Red if any character but tags and the whitespace beside them disappears, or text changes places."""
    reasoning, content = split(opened, text)
    position = text.find(reasoning)
    assert position >= 0
    assert text.endswith(content)
    assert len(reasoning) + len(content) <= len(text)


@given(TEXTS, st.booleans())
def test_little_is_held(text: str, opened: bool) -> None:
    """Red if text waits that can be told already."""
    splitter = ReasoningSplitter(opened)
    for character in text:
        splitter.feed(character)
        assert len(splitter._held) < MAX_HELD + len("</think>")


def test_detection() -> None:
    """Red if a template without tags counts as thinking, or an opened prompt isn't noticed."""
    assert template_thinks("{{ content.split('</think>')[-1] }}")
    assert not template_thinks("<|im_start|>{{ content }}")
    assert opens_thinking("assistant\n<think>\n")
    assert not opens_thinking("<think>\n\n</think>\n\n")
