"""Requests that are refused before they reach the engine core: counted like those that it refuses, once each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.unit.scripted_answers import Site
from tests.unit.text_front import failed, text_front
from tests.unit.vllm_front import fronting

CHAT = [{"role": "user", "content": "Who?"}]


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    assert site.metrics.open_requests == 0


def counted(site: Site) -> tuple[int, int]:
    """Requests refused, and all whose time was taken."""
    figures = site.metrics.figures()
    return figures.outcomes["rejected"], sum(figures.duration.counts)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400),
        ("/v1/completions", {"prompt": "x", "model": "another"}, 404),
        ("/v1/completions", {"prompt": ["x", "y" * 1_000_000]}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": CHAT, "model": "another"}, 404),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "y" * 1_000_000}]}, 400),
    ],
)
async def test_http(site: Site, path: str, body: Any, status: int) -> None:
    """Red if a refusal isn't counted, is counted twice, or a call that is no request is counted."""
    async with site.client() as client:
        raw = {"content": body} if isinstance(body, bytes) else {"json": body}
        assert (await client.post(path, **raw)).status_code == status
        assert counted(site) == (1, 1)
        await client.post("/tokenize", json={"prompt": "x", "model": "another"})
        await client.post("/v1/completions", json={"prompt": "x"})
    assert counted(site) == (1, 2)


async def test_grpc(site: Site) -> None:
    """Red if a refusal over text gRPC or VllmEngine isn't counted, or twice."""
    async with text_front(site) as front:
        bad: list[dict[str, Any]] = [{"model": "another", "prompt": "x"}, {}, {"prompt": "x" * 1_000_000}]
        for number, fields in enumerate(bad, 1):
            await failed(front.generate(**fields))
            assert counted(site) == (number, number)
    async with fronting(site.served) as vllm:
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await vllm.answer(text="x" * 1_000_000)
    assert counted(site) == (4, 4)


async def test_while_draining(site: Site) -> None:
    """Red if a drain turns clients away uncounted."""
    site.served.drain()
    async with site.client() as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 503
    assert counted(site) == (1, 1)
