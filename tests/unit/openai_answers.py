"""The OpenAI endpoints as a client reads them, and what their tests share."""

from __future__ import annotations

import json
from typing import Any

from frontend.request import TokenLogprob, TopLogprob
from tests.unit.scripted_answers import Site

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
LOGPROB = TokenLogprob(7, "He", -0.5, 1, (TopLogprob(7, "He", -0.5), TopLogprob(8, "It", -1.5)))
NEVER = TokenLogprob(9, "\ufffd", float("-inf"), 50, ())


async def post(site: Site, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with site.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer: dict[str, Any] = response.json()
    return answer


async def events(site: Site, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without the closing [DONE]."""
    async with site.client() as client:
        response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]
