"""Frontends of one server among themselves: one scrape for all, an abort wherever the request is, absence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from frontend.config import Place
from frontend.peers import Peers, Question
from frontend.scrape import Scrape
from tests.unit.scripted_answers import Site
from tests.unit.scripted_engine import socket_folder


@pytest_asyncio.fixture
async def folder() -> AsyncIterator[Path]:
    async with socket_folder() as path:
        yield path


@contextlib.asynccontextmanager
async def running(folder: Path, number: int, count: int = 2) -> AsyncIterator[Peers]:
    peers = Peers(Place(number, count, str(folder)))
    await peers.start()
    try:
        yield peers
    finally:
        await peers.stop()


async def test_a_scrape_covers_every_frontend(folder: Path) -> None:
    """Red if a scrape of one frontend misses another's figures, takes old ones, or fails with a frontend away."""
    sites = Site(), Site()
    sites[1].metrics.count_outcome("length")

    async def scraped() -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families((await scrape.text()).decode())
        return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}

    async with running(folder, 1) as first:
        scrape = Scrape(sites[0].served, first)
        async with running(folder, 2) as second:
            Scrape(sites[1].served, second)
            found = await scraped()
            assert found["greenlane_frontend_requests_total", "2", "length"] == 1.0
            sites[1].metrics.count_outcome("length")
            found = await scraped()
            assert found["greenlane_frontend_requests_total", "2", "length"] == 2.0
            assert found["greenlane_frontend_requests_total", "1", "length"] == 0.0
            assert found["greenlane_engine_uptime_seconds", "1"] == 5.0
        found = await scraped()
        assert found["greenlane_frontend_up", "1"] == 1.0
        assert found["greenlane_frontend_up", "2"] == 0.0
        assert ("greenlane_frontend_requests_total", "2", "length") not in found


async def test_who_doesnt_answer_is_absent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a frozen frontend, one that fails, or one that answers nonsense holds up or fails the asker."""
    monkeypatch.setattr("frontend.peers.ANSWER_S", 0.1)
    release = asyncio.Event()

    async def freeze(question: Question) -> object:
        await release.wait()
        return 1

    async def fail(question: Question) -> object:
        raise ValueError("no")

    async def echo(question: Question) -> object:
        return question["word"]

    async with running(folder, 1) as asker, running(folder, 2) as other:
        other.on("freeze", freeze)
        other.on("fail", fail)
        other.on("echo", echo)
        assert await asker.ask("echo", word="hello") == {2: "hello"}
        for question in ("freeze", "fail", "unknown"):
            assert await asker.ask(question) == {2: None}
        assert await asker.ask("echo", word="still") == {2: "still"}
        release.set()


async def test_a_restarted_frontend_takes_its_place_again(folder: Path) -> None:
    """Red if the socket of a frontend that was killed keeps its successor from the others."""

    async def hello(question: Question) -> object:
        return "hello"

    killed = Peers(Place(2, 2, str(folder)))
    await killed.start()
    assert (folder / "frontend-2.sock").exists()
    async with running(folder, 1) as asker, running(folder, 2) as successor:
        successor.on("hello", hello)
        assert await asker.ask("hello") == {2: "hello"}
    await killed.stop()


async def test_alone_there_is_nobody_to_ask() -> None:
    """Red if a frontend by itself opens a socket or waits for others."""
    alone = Peers(Place())
    await alone.start()
    assert await alone.ask("figures") == {}
    await alone.stop()
