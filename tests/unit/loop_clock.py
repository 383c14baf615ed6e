"""A clock that counts the turns of the event loop, for tests of what goes on in one of them."""

from __future__ import annotations

import asyncio


class Clock:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.now = 0
        self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.now += 1

    def stop(self) -> None:
        self._ticking.cancel()
