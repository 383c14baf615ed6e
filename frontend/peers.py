"""The other frontends of a server: what one of them is asked that concerns them all.

Owns a unix socket in a folder that `greenlane serve` made for its frontends alone (mode 0700), named by the frontend's
place, and one exchange on it: a JSON line asks, a JSON line answers. Who doesn't answer in time counts as absent; a
frontend that is being restarted holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from frontend.config import Place

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 20
ANSWER_S = 1.0

Question = Mapping[str, Any]
Answerer = Callable[[Question], Awaitable[object]]


class Peers:
    """This frontend among those of its server."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._answers: dict[str, Answerer] = {}
        self._server: asyncio.Server | None = None

    def on(self, question: str, answer: Answerer) -> None:
        """Answer questions of this name from now on, with what `answer` returns, as JSON."""
        self._answers[question] = answer

    async def start(self) -> None:
        """Listen for the others."""
        if self.place.folder is not None:
            path = self._path(self.place.number)  # asyncio removes the socket of this frontend before its restart
            self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_LINE_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def ask(self, question: str, **details: Any) -> dict[int, Any]:
        """What the others answer, by place; None from those that don't."""
        if self.place.folder is None:
            return {}
        others = [number for number in range(1, self.place.count + 1) if number != self.place.number]
        line = msgspec.json.encode({"question": question, **details}) + b"\n"
        answers = await asyncio.gather(*(self._ask(number, line) for number in others))
        return dict(zip(others, answers, strict=True))

    async def _ask(self, number: int, line: bytes) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._path(number), limit=MAX_LINE_BYTES)
                try:
                    writer.write(line)
                    return msgspec.json.decode(await reader.readline())
                finally:
                    writer.close()
        except (OSError, ValueError, msgspec.DecodeError) as error:  # TimeoutError is an OSError
            logger.warning("frontend %d didn't answer: %s", number, type(error).__name__)
            return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                question = msgspec.json.decode(await reader.readline())
                answer = await self._answers[question["question"]](question)
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        except (OSError, ValueError, LookupError, TypeError, msgspec.DecodeError) as error:
            logger.warning("a question of another frontend failed: %s", type(error).__name__)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _path(self, number: int) -> Path:
        return Path(str(self.place.folder)) / f"frontend-{number}.sock"
