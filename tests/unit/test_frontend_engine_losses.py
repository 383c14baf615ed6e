"""The engine client when its engine core is lost, silent, another one, or speaks nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from greenlane.engine.v1 import engine_pb2 as pb

from frontend import engine_client
from frontend.clock import SystemClock
from frontend.engine_calls import connection_remedy
from frontend.engine_channel import open_channel
from frontend.engine_client import (
    MAX_BACKOFF_S,
    STARTING_BACKOFF_S,
    TAKE_IN_S,
    ClientState,
    EngineClient,
)
from frontend.engine_group import EngineGroup
from frontend.request import ApiError, Code, TextRequest
from frontend.streams import RequestStream
from tests.unit.client_rig import ManualClock, connected_client, failure, state_of
from tests.unit.scripted_engine import (
    ScriptedEngine,
    ScriptedSession,
    finish,
    info,
    listening,
    socket_folder,
    step_output,
)


@pytest_asyncio.fixture
async def folder() -> AsyncIterator[Path]:
    async with socket_folder() as path:
        yield path


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[ScriptedEngine]:
    scripted = ScriptedEngine(info())
    async with listening(scripted, folder / "engine"):
        yield scripted


@pytest_asyncio.fixture
async def client(folder: Path, engine: ScriptedEngine) -> AsyncIterator[EngineClient]:
    async with connected_client(folder) as client:
        yield client


async def test_a_lost_session_turns_health_first_then_fails_then_reconnects(
    client: EngineClient, engine: ScriptedEngine
) -> None:
    """Red if a request fails while health still says SERVING, or if no new session is opened."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()
    seen: list[tuple[ClientState, bool]] = []

    async def listener(state: ClientState) -> None:
        seen.append((state, stream.error is not None))

    client.on_state(listener)
    engine.info.instance_id = "two"
    engine.info.limits.max_model_len = 77
    session.end(details="cause of death")
    error = await failure(stream)
    assert seen[0] == (ClientState.DEAD, False)
    assert (error.code, "cause of death" in error.message) == (Code.UNAVAILABLE, True)
    second = await engine.session()
    await state_of(client, ClientState.SERVING)
    assert client.info is not None
    assert client.info.limits.max_model_len == 77
    client.abort(stream)  # the old session's number 1 must not end the new one's
    again = await client.submit(TextRequest([9]))
    add = await second.next_add()
    client.abort(stream)
    assert (add.number, again.number, client.open_sequences) == (1, 1, 1)


async def test_the_state_that_the_core_tells(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a draining engine core is sent new requests, its open ones are cut off, or health hears of it late."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()
    seen: list[tuple[ClientState, bool]] = []

    async def listener(state: ClientState) -> None:
        seen.append((state, stream.error is not None))

    client.on_state(listener)
    await session.write(pb.SessionResponse(state=pb.ENGINE_STATE_DRAINING))
    await state_of(client, ClientState.DRAINING)
    with pytest.raises(ApiError, match="it is draining") as refused:
        await client.submit(TextRequest([2]))
    assert refused.value.code is Code.UNAVAILABLE
    assert (stream.error, client.open_sequences) == (None, 1)
    error = pb.Error(code=14, message="the worker was killed")
    last = step_output(1, accepted=[1], finishes=[finish(1, "ERROR", error=error)])
    await session.write(pb.SessionResponse(state=pb.ENGINE_STATE_DEAD, output=last))
    assert "the worker was killed" in (await failure(stream)).message
    assert seen == [(ClientState.DRAINING, False), (ClientState.DEAD, False)]
    session.end()
    await engine.session()
    await state_of(client, ClientState.SERVING)


async def test_a_core_that_takes_no_session_says_why(folder: Path) -> None:
    """Red if an engine core that loads its model again counts as dead once it can be asked."""
    engine = ScriptedEngine(info())
    async with listening(engine, folder / "engine"):
        client = EngineClient(f"unix:{folder / 'engine'}")
        await client.start()
        await engine.session()
        await state_of(client, ClientState.SERVING)
    await state_of(client, ClientState.DEAD)
    engine = ScriptedEngine(info(state=pb.ENGINE_STATE_STARTING, instance_id="two"))
    engine.refusal = "the engine core is starting"
    async with listening(engine, folder / "engine"):
        await state_of(client, ClientState.STARTING)
        engine.info.state = pb.ENGINE_STATE_DRAINING
        await state_of(client, ClientState.DRAINING)
        engine.refusal = ""
        await state_of(client, ClientState.SERVING)
        await client.close()


async def test_a_core_that_ends_the_call_before_the_greeting_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red if a greeting that meets a call which has ended keeps its end from being read: the core would count as silent
    5 s later, and a frontend that waits for it to load would serve so much later than it could."""

    async def lost(*_: object) -> None:
        await asyncio.Event().wait()

    engine, clock = ScriptedEngine(info(state=pb.ENGINE_STATE_STARTING)), ManualClock()
    engine.refusal = "the engine core is starting"
    monkeypatch.setattr(engine_client, "write", lost)
    async with listening(engine, folder / "engine"):
        client = EngineClient(f"unix:{folder / 'engine'}", clock=clock)
        await client.start()
        await state_of(client, ClientState.STARTING)
        assert client.lost_reason == "UNAVAILABLE: the engine core is starting"
        await client.close()


class Naps(SystemClock):
    """The machine's clock; notes how long each sleep between two attempts was to last, and keeps it short."""

    def __init__(self) -> None:
        self.lasted: list[float] = []
        self.enough = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds < HELLO_S:
            self.lasted.append(seconds)
            if len(self.lasted) == 12:
                self.enough.set()
        await super().sleep(min(seconds, 0.01))


HELLO_S = 4.0
"""Below it: waits between two attempts; the watch over a session takes longer."""


@pytest.mark.parametrize(
    ("state", "most"), [(pb.ENGINE_STATE_STARTING, STARTING_BACKOFF_S), (pb.ENGINE_STATE_DEAD, MAX_BACKOFF_S)]
)
async def test_a_starting_core_is_asked_often(folder: Path, state: int, most: float) -> None:
    """Red if a frontend that waits for its core to load looks for it as rarely as for one that has failed: serving
    would begin up to MAX_BACKOFF_S later; or if one that has failed is asked as often."""
    engine, clock = ScriptedEngine(info(state=state)), Naps()
    engine.refusal = "not now"
    async with listening(engine, folder / "engine"):
        client = EngineClient(f"unix:{folder / 'engine'}", clock=clock)
        await client.start()
        await clock.enough.wait()
        await client.close()
    assert max(clock.lasted) == most


async def test_a_core_that_loads_has_no_figures(folder: Path) -> None:
    """Red if its figures come and go with the attempts at a session: a metric that flips sets off alerts."""
    engine = ScriptedEngine(info(state=pb.ENGINE_STATE_STARTING))
    engine.refusal = "the engine core is starting"
    async with listening(engine, folder / "engine"):
        client = EngineClient(f"unix:{folder / 'engine'}")
        group = EngineGroup([client])
        await group.start()
        await state_of(client, ClientState.STARTING)
        client.calls.channel = open_channel(f"unix:{folder / 'engine'}")
        assert await group.each_stats() == [None]
        engine.info.state, engine.refusal = pb.ENGINE_STATE_SERVING, ""
        await state_of(client, ClientState.SERVING)
        assert await group.each_stats() != [None]
        await group.close()


@pytest.mark.parametrize(
    ("details", "named"),
    [
        ("last error: UNAVAILABLE: ipv4:127.0.0.1:7000: Socket closed", "--engine-tls-ca-certs"),
        ("Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL", "--engine-tls-ca-certs"),
        ("connect: Connection refused (111)", "`greenlane engine`"),
    ],
)
def test_why_no_connection_comes_about_has_a_remedy(details: str, named: str) -> None:
    """Red when a log names the library's reason alone."""
    assert named in connection_remedy(details)


async def test_without_a_session_requests_are_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red if a request waits for an engine core that isn't there, or if a refused connection ends the client, or nobody
    says that it tries again."""
    attempts = asyncio.Semaphore(0)

    def connect(address: str) -> grpc.aio.Channel:
        attempts.release()
        return open_channel(address)

    client = EngineClient(f"unix:{folder / 'engine'}", connect=connect)
    with pytest.raises(ApiError) as refused:
        await client.submit(TextRequest([1]))
    assert refused.value.code is Code.UNAVAILABLE
    await client.start()
    for _ in range(2):  # the second follows the first one's failure
        await attempts.acquire()
    assert client.lost_reason == "it can't be reached"  # and not where it was looked for
    assert "trying again" in caplog.text
    engine = ScriptedEngine(info())
    async with listening(engine, folder / "engine"):
        await engine.session()
        await state_of(client, ClientState.SERVING)
    await state_of(client, ClientState.DEAD)
    await client.close()
    assert client.state is ClientState.CLOSED


async def _waiting(
    folder: Path, engine: ScriptedEngine, clock: ManualClock
) -> tuple[EngineClient, ScriptedSession, RequestStream]:
    """A client that gives up after 5 s of silence, its session, and a request that waits for its first token."""
    client = EngineClient(f"unix:{folder / 'engine'}", engine_timeout=5.0, clock=clock)
    await client.start()
    await client.serving()
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()
    return client, session, stream


async def test_silence_ends_the_session(folder: Path, engine: ScriptedEngine) -> None:
    """Red if a frozen engine core keeps requests waiting, or if a heartbeat doesn't count as a sign of life."""
    clock = ManualClock()
    client, session, stream = await _waiting(folder, engine, clock)
    clock.advance(4.5)
    await session.send(tokens=[(1, 5)])
    while not stream.ready:
        await stream.changed()
    clock.advance(0.6)  # 5.1 s since the welcome, 0.6 since the token
    await _turns()
    assert (client.state, stream.error) == (ClientState.SERVING, None)
    clock.advance(4.5)
    await _turns()
    clock.advance(TAKE_IN_S)
    error = await failure(stream)
    assert (error.code, "silent" in error.message) == (Code.UNAVAILABLE, True)
    await client.close()


async def test_what_waits_to_be_read_comes_before_silence(folder: Path, engine: ScriptedEngine) -> None:
    """Red if a frontend that stood still for a moment gives up an engine core whose sign of life it hasn't read yet."""
    clock = ManualClock()
    client, session, stream = await _waiting(folder, engine, clock)
    clock.advance(5.1)
    await _turns()
    await session.send(tokens=[(1, 5)])
    while not stream.ready:
        await stream.changed()
    clock.advance(TAKE_IN_S)
    await _turns()
    assert (client.state, stream.error) == (ClientState.SERVING, None)
    await client.close()


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_late_timer_is_no_proof_of_silence(folder: Path, engine: ScriptedEngine) -> None:
    """Red if a frontend that was itself frozen for a minute blames the engine core before reading on."""
    clock = ManualClock()
    client = EngineClient(f"unix:{folder / 'engine'}", engine_timeout=5.0, clock=clock)
    await client.start()
    await client.serving()
    clock.advance(60.0)
    await _turns()
    assert client.state is ClientState.SERVING
    clock.advance(5.0)
    await _turns()
    clock.advance(TAKE_IN_S)
    await state_of(client, ClientState.DEAD)
    await client.close()


def malformed() -> list[pb.SessionResponse]:
    output = pb.StepOutput
    eight, four = b"\x01" + bytes(7), bytes(4)
    logprobs = pb.LogprobColumns(rows=four, sampled=four, ranks=four, counts=b"\x01" + bytes(3))
    beyond = pb.LogprobColumns(rows=b"\x07" + bytes(3), sampled=four, ranks=four, counts=four)
    return [
        pb.SessionResponse(welcome=pb.Welcome(protocol_version=1)),
        *(
            pb.SessionResponse(output=bad)
            for bad in (
                output(sequence=2),
                output(sequence=1, accepted=b"123"),
                output(sequence=1, numbers=eight),
                output(sequence=1, numbers=eight, tokens=b"12345"),
                output(sequence=1, numbers=eight, tokens=(4096).to_bytes(4, "little")),
                output(sequence=1, numbers=eight, tokens=b"\xff" * 4),
                output(sequence=1, numbers=b"\xff" * 8, tokens=four),
                output(sequence=1, started=eight),
                output(sequence=1, numbers=eight, tokens=four, logprobs=logprobs),
                output(sequence=1, numbers=eight, tokens=four, logprobs=beyond),
                output(sequence=1, finishes=[pb.Finish(number=1)]),
                output(sequence=1, finishes=[pb.Finish(number=99, reason=pb.FINISH_REASON_STOP)]),
            )
        ),
    ]


@pytest.mark.parametrize("message", malformed(), ids=lambda message: str(message).replace("\n", " ")[:60])
async def test_malformed_output_ends_the_session(
    client: EngineClient, engine: ScriptedEngine, message: pb.SessionResponse
) -> None:
    """Red if any check of the engine core's columns is dropped: requests would hang or get wrong tokens."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()
    await session.write(message)
    error = await failure(stream)
    assert error.code is Code.UNAVAILABLE
    assert "silent" not in error.message  # which would be the watchdog's doing
    await engine.session()


async def test_a_foreign_protocol_version_is_named(folder: Path, engine: ScriptedEngine) -> None:
    """Red if a core of another version is spoken to, or the reason is lost."""
    engine.protocol_version = 2
    client = EngineClient(f"unix:{folder / 'engine'}")
    await client.start()
    await engine.session()
    await engine.session()
    assert (client.state, "version 2" in client.lost_reason) == (ClientState.CONNECTING, True)
    await client.close()


async def test_another_vocabulary_after_a_restart_is_refused(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a core that came back with another model is served with the old tokenizer."""
    session = await engine.session()
    engine.info.vocab_size = 32000
    session.end()
    await engine.session()
    await engine.session()
    assert (client.state, "restart this frontend" in client.lost_reason) == (ClientState.DEAD, True)


async def test_a_call_whose_session_is_lost_fails_as_such(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if closing the channel looks like a cancellation of the caller's task, which would end a metrics scrape."""
    session = await engine.session()
    engine.stats_answer.clear()
    asking = asyncio.create_task(client.calls.get_stats())
    await engine.asked.wait()
    session.end()
    with pytest.raises(ApiError) as failed:
        await asking
    assert failed.value.code is Code.UNAVAILABLE
    engine.asked.clear()
    await engine.session()
    await state_of(client, ClientState.SERVING)
    cancelled = asyncio.create_task(client.calls.get_stats())
    await engine.asked.wait()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
