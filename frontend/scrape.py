"""One look at the whole server: this frontend's figures, the other frontends', and the engine core's, all fresh.

Owns the question that frontends ask one another for it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.exposition import Engines, Frontends, render
from frontend.metrics import Figures
from frontend.peers import Peers, Question
from frontend.serving import Served

FIGURES = "figures"


@dataclass(frozen=True, slots=True)
class Seen:
    """What there was to see at one moment."""

    frontends: Frontends
    engines: Engines


class Scrape:
    """What `/metrics` and the page's figures are made of."""

    def __init__(self, served: Served, peers: Peers) -> None:
        self._served = served
        self._peers = peers
        peers.on(FIGURES, self._answer)

    async def look(self) -> Seen:
        """Ask everybody."""
        engines, others = await asyncio.gather(self._served.each_stats(), self._peers.ask(FIGURES))
        frontends: dict[int, Figures | None] = {place: _read(answer) for place, answer in others.items()}
        frontends[self._peers.place.number] = self._served.figures()
        return Seen(frontends, engines)

    async def text(self) -> bytes:
        """Prometheus text."""
        seen = await self.look()
        return render(seen.frontends, seen.engines)

    async def _answer(self, question: Question) -> Figures:
        return self._served.figures()


def _read(answer: Any) -> Figures | None:
    return None if answer is None else msgspec.convert(answer, Figures)
