"""Stop strings are found wherever the text breaks, and nothing that could be one leaks out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.stop_strings import StopMatch, StopStrings


def feed(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    """(text released, stop string found)."""
    matcher = StopStrings(stops).matcher()
    shown = ""
    for part in parts:
        result = matcher.push(part)
        if isinstance(result, StopMatch):
            return shown + result.text, result.stop
        shown += result
    return shown + matcher.flush(), None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """By the definition: the first end, then the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    parts=st.lists(st.text("abcd", max_size=4), max_size=12),
)
def test_the_breaks_of_the_text_dont_matter(stops: list[str], parts: list[str]) -> None:
    """Red if a match depends on where pieces break, a prefix is lost, or the wrong match wins."""
    assert feed(stops, parts) == expected(stops, "".join(parts))


@settings(max_examples=200, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    parts=st.lists(st.text("abc", max_size=3), max_size=12),
)
def test_only_possible_prefixes_are_held_back(stops: list[str], parts: list[str]) -> None:
    """Red if a possible beginning leaks, or if text that can't be part of a stop string any more is held."""
    matcher = StopStrings(stops).matcher()
    seen = shown = ""
    for part in parts:
        seen += part
        result = matcher.push(part)
        if isinstance(result, StopMatch):
            return
        shown += result
        possible = [size for size in range(1, 7) if any(s.startswith(seen[-size:]) for s in stops if len(s) > size)]
        held = max((size for size in possible if size <= len(seen)), default=0)
        assert shown == seen[: len(seen) - held]


def test_pieces_of_a_long_stop_string_dont_leak() -> None:
    """Case 24. Red if DEF, GH or IJ of "DEFGHIJ" is shown before the rest decides."""
    matcher = StopStrings(["DEFGHIJ"]).matcher()
    assert [matcher.push(part) for part in ("ABC", "DEF", "GH")] == ["ABC", "", ""]
    assert matcher.push("I!") == "DEFGHI!"
    assert [matcher.push(part) for part in ("DEF", "GH")] == ["", ""]
    assert matcher.push("IJ rest") == StopMatch("", "DEFGHIJ")


def test_characters_that_mean_something_in_patterns_are_plain() -> None:
    """Red if a stop string is read as a regular expression."""
    for stop in ("]", "^", "\\", "-", "[a-z]", "\n\n", "."):
        assert feed([stop], ["say ", stop, "x"]) == ("say ", stop)
        assert feed([stop], ["say", "q"]) == ("sayq", None)


def test_the_work_is_linear_in_the_text() -> None:
    """Red if near-matches make the matcher look at characters again and again: held text must not be rescanned."""
    stop = "a" * 255 + "b"
    matcher = StopStrings([stop]).matcher()
    shown = "".join(str(matcher.push("a")) for _ in range(50_000))
    assert len(shown) == 50_000 - 255
    assert matcher.flush() == "a" * 255
