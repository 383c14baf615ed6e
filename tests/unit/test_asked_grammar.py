"""What a client's words for a constraint mean at the edge: nothing is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.grammar import asked_grammar
from frontend.openai_fields import Fields
from frontend.request import ApiError


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"regex": ""}},
        {"structured_outputs": {"grammar": ""}},
        {"guided_choice": []},
        {"guided_regex": ""},
    ],
)
def test_an_empty_constraint_is_refused(body: dict[str, Any]) -> None:
    """Red when a constraint that constrains nothing is dropped, and free text comes where a choice was asked for."""
    with pytest.raises(ApiError, match="is empty"):
        asked_grammar(Fields(body))


def test_an_absent_constraint_is_none() -> None:
    """Red when null or an absent field counts as an empty constraint."""
    assert asked_grammar(Fields({"guided_regex": None, "structured_outputs": None})) is None
