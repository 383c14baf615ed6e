"""Turns of an event loop for one kind of work, in the order of coming.

Owns the order and the pace. What goes on in a turn holds up everything else until the turn is over; so work of which
much may come at once is done a little at a time, with turns for others between.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """`room` pieces of work go on together, then none for `apart` turns of the loop.

    Whoever comes while there is room goes on at once, ahead of those just woken: by at most `room` places.
    """

    def __init__(self, room: int, apart: int) -> None:
        self._room = self._left = room
        self._apart = apart
        self._to_come = 0
        """Turns until there is room again; 0: it isn't waited for."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def mine(self) -> None:
        """Returns when it is this piece's turn: at once, unless many came just before."""
        if self._left:
            self._take()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _take(self) -> None:
        self._left -= 1
        if not self._to_come:
            self._to_come = self._apart
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        self._to_come -= 1
        if self._to_come:
            asyncio.get_running_loop().call_soon(self._pass)
            return
        self._left = self._room
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # nobody has left meanwhile
                turn.set_result(None)
                self._take()
