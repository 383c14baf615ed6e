"""One scrape for the whole server: this frontend's figures, the other frontends', and the engine core's, all fresh.

Owns the question that frontends ask one another for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from frontend.exposition import render
from frontend.metrics import Figures
from frontend.peers import Peers, Question
from frontend.serving import Served

FIGURES = "figures"


class Scrape:
    """What `/metrics` answers with."""

    def __init__(self, served: Served, peers: Peers) -> None:
        self._served = served
        self._peers = peers
        peers.on(FIGURES, self._answer)

    async def text(self) -> bytes:
        """Prometheus text."""
        stats, others = await asyncio.gather(self._served.each_stats(), self._peers.ask(FIGURES))
        figures: dict[int, Figures | None] = {place: _read(answer) for place, answer in others.items()}
        figures[self._peers.place.number] = self._served.figures()
        return render(figures, stats)

    async def _answer(self, question: Question) -> Figures:
        return self._served.figures()


def _read(answer: Any) -> Figures | None:
    return None if answer is None else msgspec.convert(answer, Figures)
