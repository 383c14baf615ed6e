"""One or several engine cores behind a frontend, used as one: each request goes to one of them.

Owns the choice: among the cores that serve, those with the fewest open sequences of this frontend, within a slack of
1/16 of what a core runs at once; among these the one that has seen the longest prefix of the prompt, else the least
loaded. What is lost with one core is that core's; the others go on, and health says serving as long as one does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence as Items

from greenlane.engine.v1 import engine_pb2 as pb

from frontend.affinity import Affinity, prefixes
from frontend.engine_client import ClientState, EngineClient, Listener
from frontend.request import ApiError, Code, TextRequest
from frontend.streams import RequestStream, Sequence

logger = logging.getLogger(__name__)

SLACK_PART = 16
STATS_TIMEOUT_S = 2.0
_BEST_FIRST = (
    ClientState.SERVING,
    ClientState.STARTING,
    ClientState.CONNECTING,
    ClientState.DRAINING,
    ClientState.DEAD,
    ClientState.CLOSED,
)


class EngineGroup:
    """The clients of all the engine cores that a frontend was told of."""

    def __init__(self, clients: Items[EngineClient]) -> None:
        self.state = ClientState.CONNECTING
        """The best of theirs."""
        self.info: pb.GetInfoResponse | None = None
        """Of the first that serves, with the smallest context of those; a new object at every change of any of them."""
        self.clients = tuple(clients)
        """One for each engine core."""
        self._affinity = Affinity()
        self._instances: dict[int, str] = {}
        self._strangers: set[int] = set()
        """Cores with another model than the first that served: nothing is sent there."""
        self._listeners: list[Listener] = []
        for client in self.clients:
            client.on_state(self._changed)

    # -------------------------- life

    def on_state(self, listener: Listener) -> None:
        """Call the listener when any core's state changes, with the state of all; see `EngineClient.on_state`."""
        self._listeners.append(listener)

    async def start(self) -> None:
        for client in self.clients:
            await client.start()

    async def serving(self) -> None:
        """Wait until one of them serves."""
        waits = [asyncio.ensure_future(client.serving()) for client in self.clients]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def close(self) -> None:
        """End the sessions; open requests end with UNAVAILABLE."""
        await asyncio.gather(*(client.close() for client in self.clients))

    async def _changed(self, _: ClientState) -> None:
        for core, client in enumerate(self.clients):
            if client.info is not None and self._instances.get(core) != client.info.instance_id:
                self._instances[core] = client.info.instance_id
                self._affinity.forget(core)
                self._check_model(core, client.info)
        cores = [core for core in range(len(self.clients)) if core not in self._strangers]
        self.state = min((self.clients[core].state for core in cores), key=_BEST_FIRST.index)
        self._refresh_info(self._serving() or cores)
        for listener in self._listeners:
            await listener(self.state)

    def _check_model(self, core: int, info: pb.GetInfoResponse) -> None:
        """A request may go to any core, so their models must be alike."""
        before = self.info
        if before is None or (before.architecture, before.vocab_size) == (info.architecture, info.vocab_size):
            self._strangers.discard(core)
            return
        self._strangers.add(core)
        logger.error(
            "engine core %d serves %s with %d ids, the others %s with %d: it gets no requests",
            *(core + 1, info.architecture, info.vocab_size, before.architecture, before.vocab_size),
        )

    def _refresh_info(self, cores: Items[int]) -> None:
        known = [info for core in cores if (info := self.clients[core].info) is not None]
        if known:
            self.info = pb.GetInfoResponse()
            self.info.CopyFrom(known[0])
            self.info.limits.max_model_len = min(info.limits.max_model_len for info in known)

    def _serving(self) -> list[int]:
        return [
            core
            for core, client in enumerate(self.clients)
            if client.state is ClientState.SERVING and core not in self._strangers
        ]

    # -------------------------- requests

    async def submit(self, request: TextRequest) -> RequestStream:
        """Send a request to one of them. Raises ApiError as `EngineClient.submit` does."""
        if len(self.clients) == 1:
            return await self.clients[0].submit(request)
        keys = prefixes(request)
        core = self._choose(keys)
        self._affinity.note(keys, core)
        return await self.clients[core].submit(request)

    def _choose(self, keys: list[bytes]) -> int:
        """Raises ApiError (UNAVAILABLE) when none serves."""
        served = {core: self.clients[core].open_sequences for core in self._serving()}
        if not served:
            reasons = "; ".join(dict.fromkeys(client.lost_reason for client in self.clients))
            raise ApiError(Code.UNAVAILABLE, f"no engine core is available: {reasons}", retry_after_s=1.0)
        least = min(served, key=lambda core: served[core])
        info = self.clients[least].info
        slack = 0 if info is None else info.limits.max_num_seqs // SLACK_PART
        near = [core for core, load in served.items() if load <= served[least] + slack]
        familiar = self._affinity.best(keys, near)
        return least if familiar is None else familiar

    def abort(self, stream: RequestStream) -> None:
        """End what is open of a request. Idempotent; a core that doesn't have it ignores it."""
        for client in self.clients:
            client.abort(stream)

    def abort_sequence(self, sequence: Sequence) -> None:
        """End one of a request's sequences. Idempotent."""
        for client in self.clients:
            client.abort_sequence(sequence)

    # -------------------------- figures

    @property
    def fail_stops(self) -> int:
        return sum(client.fail_stops for client in self.clients)

    @property
    def sessions_lost(self) -> int:
        return sum(client.sessions_lost for client in self.clients)

    async def each_stats(self) -> list[pb.GetStatsResponse | None]:
        """GetStats of each, in the order in which they were given; None where one doesn't answer."""
        return await asyncio.gather(*(_stats(client) for client in self.clients))

    async def flush_cache(self) -> int:
        """Pages dropped by all of them. Raises ApiError (UNAVAILABLE) when one doesn't answer."""
        return sum(await asyncio.gather(*(client.calls.flush_cache() for client in self.clients)))


async def _stats(client: EngineClient) -> pb.GetStatsResponse | None:
    """Not of one that loads its model: it would answer now and then, when an attempt at a session is under way."""
    if client.state in (ClientState.CONNECTING, ClientState.STARTING):
        return None
    try:
        return await asyncio.wait_for(client.calls.get_stats(), STATS_TIMEOUT_S)
    except (ApiError, TimeoutError):
        return None


def added_up(each: Items[pb.GetStatsResponse | None]) -> pb.GetStatsResponse | None:
    """Their gauges and counters together, with the shortest uptime; None if none answered."""
    answered = [stats for stats in each if stats is not None]
    if not answered:
        return None
    total = pb.GetStatsResponse(state=answered[0].state, uptime_s=min(stats.uptime_s for stats in answered))
    for stats in answered:
        for into, part in ((total.gauges, stats.gauges), (total.counters, stats.counters)):
            for field, value in part.ListFields():
                setattr(into, field.name, getattr(into, field.name) + value)
    return total
