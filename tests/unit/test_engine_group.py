"""Several engine cores behind one frontend: who gets a request, and what the loss of one costs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from greenlane.engine.v1 import engine_pb2 as pb

from frontend.affinity import MAX_PREFIXES, Affinity, prefixes
from frontend.engine_client import ClientState, EngineClient
from frontend.engine_group import EngineGroup, added_up
from frontend.request import ApiError, Code, TextRequest
from frontend.streams import RequestStream
from tests.unit.scripted_answers import until
from tests.unit.scripted_engine import ScriptedEngine, ScriptedSession, info, listening, socket_folder

LONG = list(range(1, 200))
SLACK = 16
"""1/16 of the 256 sequences that a scripted core runs at once."""


class Cores:
    """Scripted engine cores and the group over them."""

    def __init__(self, group: EngineGroup, stops: list[contextlib.AsyncExitStack]) -> None:
        self.group = group
        self._stops = stops
        self.sessions: list[ScriptedSession] = []

    async def sent(self, ids: list[int], salt: str | None = None) -> tuple[int, RequestStream]:
        """Submit; which core got it, and the request."""
        before = [len(session.adds) for session in self.sessions]
        stream = await self.group.submit(TextRequest(ids, cache_salt=salt))
        await until(lambda: [len(session.adds) for session in self.sessions] != before)
        return next(core for core, each in enumerate(self.sessions) if len(each.adds) > before[core]), stream

    async def lose(self, core: int) -> None:
        await self._stops[core].aclose()

    async def state(self, state: ClientState) -> None:
        await until(lambda: self.group.state is state)


@contextlib.asynccontextmanager
async def cores(*engines: ScriptedEngine) -> AsyncIterator[Cores]:
    async with socket_folder() as folder, contextlib.AsyncExitStack() as all_stops:
        stops, clients = [], []
        for number, engine in enumerate(engines):
            stop = await all_stops.enter_async_context(contextlib.AsyncExitStack())
            clients.append(EngineClient(await stop.enter_async_context(listening(engine, folder / str(number)))))
            stops.append(stop)
        group = EngineGroup(clients)
        await group.start()
        out = Cores(group, stops)
        out.sessions = [await engine.session() for engine in engines]
        await until(lambda: all(client.state is ClientState.SERVING for client in clients))
        try:
            yield out
        finally:
            await group.close()


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Cores]:
    async with cores(ScriptedEngine(info()), ScriptedEngine(info(instance_id="two"))) as both:
        yield both


async def test_the_least_loaded_core_gets_a_request(pair: Cores) -> None:
    """Red if requests without a known prefix pile up at one core."""
    assert [(await pair.sent([number]))[0] for number in range(1, 7)] == [0, 1, 0, 1, 0, 1]


async def test_a_known_prefix_decides_among_equals(pair: Cores) -> None:
    """Red if a prompt goes to a core that hasn't its prefix while one that has is about as free, or if that core is
    chosen whatever its load, or for another tenant."""
    core, _ = await pair.sent(LONG)
    assert core == 0
    for extra in range(SLACK):
        assert (await pair.sent([*LONG, extra]))[0] == 0
    assert (await pair.sent([*LONG, 7], salt="another tenant"))[0] == 1
    assert (await pair.sent([*LONG[:64], 9, 9, 9]))[0] == 0, "16 more than the other is within the slack"
    assert (await pair.sent([*LONG, 8]))[0] == 1
    assert (await pair.sent([*LONG, 8]))[0] == 1, "it has the prefix now"


async def test_a_lost_core_costs_its_own_requests(pair: Cores) -> None:
    """Red if the loss of one core fails requests of another, turns health, or new requests are still sent there."""
    (first, lost), (second, kept) = await pair.sent([1]), await pair.sent([2])
    assert (first, second) == (0, 1)
    seen: list[ClientState] = []

    async def listener(state: ClientState) -> None:
        seen.append(state)

    pair.group.on_state(listener)
    await pair.lose(0)
    await until(lambda: lost.error is not None)
    assert lost.error is not None
    assert lost.error.code is Code.UNAVAILABLE
    assert (kept.error, pair.group.state, set(seen)) == (None, ClientState.SERVING, {ClientState.SERVING})
    assert pair.group.sessions_lost == 1
    for number in range(3):
        await pair.group.submit(TextRequest([number + 3]))
    await pair.sessions[1].next_add(4)
    assert await pair.group.each_stats() == [None, pb.GetStatsResponse(uptime_s=1.0)]
    await pair.lose(1)
    await pair.state(ClientState.DEAD)
    with pytest.raises(ApiError, match="no engine core is available") as refused:
        await pair.group.submit(TextRequest([9]))
    assert refused.value.code is Code.UNAVAILABLE


async def test_aborts_find_their_core(pair: Cores) -> None:
    """Red if an abort ends the request of the same number at another core."""
    (_, first), (_, second) = await pair.sent([1]), await pair.sent([2])
    assert first.number == second.number == 1
    pair.group.abort(second)
    await pair.sessions[1].until(lambda: pair.sessions[1].aborts == [1])
    pair.group.abort(second)
    await pair.sent([3])
    await pair.sent([4])
    assert pair.sessions[0].aborts == []


async def test_a_core_with_another_model_gets_nothing() -> None:
    """Red if a request's ids go to a core whose vocabulary they aren't from."""
    other = info(instance_id="two", vocab_size=5000)
    async with cores(ScriptedEngine(info()), ScriptedEngine(other)) as both:
        assert len({(await both.sent([number]))[0] for number in range(1, 6)}) == 1
        assert both.group.info is not None
        assert both.group.info.vocab_size in (4096, 5000)


async def test_limits_are_those_of_the_smallest_core() -> None:
    """Red if a context is promised that one of the cores doesn't have, or info stays the same object after a change."""
    small = info(instance_id="two")
    small.limits.max_model_len = 77
    async with cores(ScriptedEngine(info()), ScriptedEngine(small)) as both:
        before = both.group.info
        assert before is not None
        assert before.limits.max_model_len == 77
        await both.lose(1)
        await until(lambda: both.group.info is not before)
        after = both.group.info
        assert after is not None
        assert after.limits.max_model_len == 2048


def test_figures_add_up() -> None:
    """Red if a core's figures are lost in the sum, or no answer at all looks like zeros."""
    one = pb.GetStatsResponse(uptime_s=5, gauges=pb.Gauges(running=2), counters=pb.Counters(steps=10))
    two = pb.GetStatsResponse(uptime_s=3, gauges=pb.Gauges(running=1, waiting=4), counters=pb.Counters(steps=1))
    total = added_up([one, None, two])
    assert total is not None
    assert (total.uptime_s, total.gauges.running, total.gauges.waiting, total.counters.steps) == (3, 3, 4, 11)
    assert added_up([None, None]) is None
    assert one.counters.steps == 10


def test_prefix_memory_is_bounded_and_forgets() -> None:
    """Red if the memory of prefixes grows without bound, or survives the core that had them."""
    memory = Affinity()
    keys = prefixes(TextRequest(LONG))
    assert len(keys) == 2
    assert prefixes(TextRequest(LONG[:63])) == []
    memory.note(keys, 1)
    assert memory.best(keys, [0, 1]) == 1
    assert memory.best(keys, [0]) is None
    memory.forget(1)
    assert memory.best(keys, [0, 1]) is None
    for number in range(MAX_PREFIXES + 10):
        memory.note([number.to_bytes(4, "big")], 0)
    assert len(memory._seen) == MAX_PREFIXES
