"""What comes at once is done a little at a time: readers of one message, calls of one moment."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from greenlane.engine.v1 import engine_pb2 as pb

from frontend import engine_channel, engine_client
from frontend.engine_client import TURNS_A_MESSAGE
from frontend.http_server import ClientGone
from frontend.openai_api import CALL_TURNS, CALLS, OpenAiApi
from frontend.request import ApiError, Code, TextRequest
from frontend.session import ADD_TURNS, MAX_UNREAD, READERS, Session
from frontend.streams import RequestStream
from frontend.turns import Turns
from frontend.wire import build_add
from tests.unit.client_rig import connected_client
from tests.unit.loop_clock import Clock
from tests.unit.scripted_answers import until
from tests.unit.scripted_engine import HANG_GUARD_S, ScriptedEngine, finish, info, listening, socket_folder, step_output

TOKEN = 7


def asked(count: int) -> tuple[Session, list[RequestStream]]:
    """A session with so many open requests, all of them sent."""
    front = Session(pb.Welcome(protocol_version=1, info=info()), lambda: None)
    streams = [front.add(build_add(TextRequest([1, 2, 3]), 16, 1 << 20)) for _ in range(count)]
    while front.take() is not None:
        pass
    return front, streams


def respond(to: Session, sequence: int, numbers: list[int], **fields: Any) -> None:
    tokens = [(number, TOKEN) for number in numbers]
    to.receive(pb.SessionResponse(output=step_output(sequence, tokens=tokens, **fields)))


def unread(stream: RequestStream) -> int:
    return len(stream.ready[0].tokens)


async def test_readers_take_turns_and_take_all_there_is() -> None:
    """Red if all readers of a message are woken in one turn, out of their order, or anew before others had a turn; or
    if what came while one waited is left for a turn of its own."""
    front, streams = asked(2 * READERS + 1)
    everybody = [stream.number for stream in streams]
    waits = [stream.changed() for stream in streams]
    respond(front, 1, everybody)
    assert not any(wait.done() for wait in waits), "receiving alone wakes nobody"
    assert front.hand_on()
    assert [wait.done() for wait in waits] == [True] * READERS + [False] * (READERS + 1)
    for stream in streams[:READERS]:
        stream.ready[0].take()
        stream.ready.clear()
    again = [stream.changed() for stream in streams[:READERS]]
    respond(front, 2, everybody)
    assert front.hand_on()
    assert [wait.done() for wait in waits] == [True] * (2 * READERS) + [False]
    assert [unread(stream) for stream in streams] == [1] * READERS + [2] * (READERS + 1)
    assert not any(wait.done() for wait in again)
    assert front.hand_on(), "the last who waited, and all but one of those who read before"
    assert waits[-1].done()
    assert [wait.done() for wait in again] == [True] * (READERS - 1) + [False]
    assert not front.hand_on()
    assert again[-1].done()


async def test_who_waits_for_a_turn_does_not_read_slowly() -> None:
    """Red if a request fails for what came before its reader was woken; or not, though that was and reads nothing."""
    front, streams = asked(READERS + 1)
    last = streams[-1]
    respond(front, 1, [stream.number for stream in streams])
    front.hand_on()
    respond(front, 2, [last.number] * MAX_UNREAD)
    assert (unread(last), last.error) == (MAX_UNREAD + 1, None)
    front.hand_on()
    respond(front, 3, [last.number])
    assert last.error is not None
    assert last.error.code is Code.RESOURCE_EXHAUSTED


async def test_who_waits_for_a_turn_hears_of_the_sessions_end() -> None:
    """Red if requests that ended before their session was lost wait for ever for the turn that would have told them."""
    front, streams = asked(READERS + 1)
    waits = [stream.changed() for stream in streams]
    numbers = [stream.number for stream in streams]
    respond(front, 1, numbers, finishes=[finish(number) for number in numbers])
    front.fail(ApiError(Code.UNAVAILABLE, "lost"))
    assert all(wait.done() for wait in waits)
    assert [(unread(stream), stream.error) for stream in streams] == [(1, None)] * len(streams)


async def test_the_next_message_is_asked_for_while_readers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if merged steps are acknowledged after all their readers alone (those read then are as old as that took) or
    before the first of them; or if more than a few are woken in a turn, and everything else waits."""
    count = READERS * (TURNS_A_MESSAGE + 3)
    reads: list[int] = []
    read_when_asked: list[int] = []
    acknowledge = Session.acknowledge

    def noted(session: Session) -> None:
        if reads:
            read_when_asked.append(len(reads))
        acknowledge(session)

    monkeypatch.setattr(Session, "acknowledge", noted)
    engine = ScriptedEngine(info())
    async with socket_folder() as folder, listening(engine, folder / "engine"), connected_client(folder) as client:
        session = await engine.session()
        streams = [await client.submit(TextRequest([1])) for _ in range(count)]
        await session.next_add(count)
        clock = Clock()

        async def read(stream: RequestStream) -> None:
            await stream.changed()
            reads.append(clock.now)

        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await asyncio.sleep(0)
        await session.send(tokens=[(stream.number, TOKEN) for stream in streams], ack_now=True)
        async with asyncio.timeout(HANG_GUARD_S):
            await asyncio.gather(*readers)
            await session.until(lambda: session.ack == 1)
        clock.stop()
    assert read_when_asked[0] == READERS * (TURNS_A_MESSAGE - 1), "the last ones woken read before anything is sent"
    assert {reads.count(turn) for turn in reads} == {READERS}


async def test_requests_of_one_moment_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if each becomes a message of its own, or the first of them waits: a busy engine core reads messages more
    slowly than they can be made, and the acknowledgement that it waits for stands behind them."""
    clock = Clock()
    sent: list[tuple[int, int]] = []
    write = engine_channel.write

    async def at_once(call: Any, message: pb.SessionRequest) -> None:
        """A transport that never holds a request up."""
        if message.adds:
            sent.append((clock.now, len(message.adds)))
        else:
            await write(call, message)

    monkeypatch.setattr(engine_client, "write", at_once)
    engine = ScriptedEngine(info())
    async with socket_folder() as folder, listening(engine, folder / "engine"), connected_client(folder) as client:
        for _ in range(3 * ADD_TURNS):
            await client.submit(TextRequest([1]))
            await asyncio.sleep(0)
        await until(lambda: sum(count for _, count in sent) == 3 * ADD_TURNS)
    clock.stop()
    assert sent[0][1] == 1, "there was nothing to wait for"
    turns = [turn for turn, _ in sent]
    assert all(later - turn >= ADD_TURNS for turn, later in itertools.pairwise(turns)), turns


async def test_work_takes_turns() -> None:
    """Red if more goes on together than there is room for, sooner than turns apart, or out of its order."""
    turns, clock = Turns(2, 5), Clock()
    began: list[tuple[int, int]] = []

    async def work(name: int) -> None:
        await turns.mine()
        began.append((name, clock.now))

    works = [asyncio.create_task(work(name)) for name in range(6)]
    await asyncio.sleep(0)
    works[3].cancel()  # who leaves takes no room
    async with asyncio.timeout(HANG_GUARD_S):
        await asyncio.gather(*works, return_exceptions=True)
    clock.stop()
    first = began[0][1]
    assert [name for name, _ in began] == [0, 1, 2, 4, 5]
    together = [when - first for _, when in began]
    assert together[:2] == [0, 0]
    assert together[2] == together[3] >= 5
    assert together[4] >= together[3] + 5


async def test_who_comes_alone_goes_on_at_once() -> None:
    """Red if a piece of work waits though nothing has been done for a while."""
    turns, clock = Turns(1, 3), Clock()
    for _ in range(2):
        before = clock.now
        await turns.mine()
        assert clock.now == before
        for _ in range(4):
            await asyncio.sleep(0)
    clock.stop()


class Caller:
    """A call whose client leaves as soon as its body is read."""

    def __init__(self, clock: Clock, read: list[int]) -> None:
        self._clock = clock
        self._read = read

    async def body(self) -> bytes:
        self._read.append(self._clock.now)
        raise ClientGone


class Uncounted:
    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def refusals_counted(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_calls_of_one_moment_begin_a_few_at_a_time(kind: str) -> None:
    """Red if a burst of calls is parsed in one turn: streams that run then wait for tens of ms."""
    clock, read = Clock(), list[int]()
    api: Any = OpenAiApi(Uncounted(), lambda: 0.0, lambda: "id")  # type: ignore[arg-type]
    call = getattr(api, kind)
    async with asyncio.timeout(HANG_GUARD_S):
        calls = [call(Caller(clock, read)) for _ in range(3 * CALLS)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    clock.stop()
    assert {type(answer) for answer in answers} == {ClientGone}
    assert [read.count(turn) for turn in sorted(set(read))] == [CALLS] * 3
    first, second, third = sorted(set(read))
    assert min(second - first, third - second) >= CALL_TURNS
