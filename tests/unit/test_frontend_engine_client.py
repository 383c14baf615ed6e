"""The engine client against a real gRPC server that a test scripts: sessions, acknowledgements, loss, reconnecting."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from greenlane.engine.v1 import engine_pb2 as pb

from frontend.engine_client import ClientState, EngineClient, open_channel
from frontend.request import ApiError, Code, Sampling, TextRequest
from frontend.session import Session
from frontend.streams import RequestStream
from tests.unit.scripted_engine import (
    HANG_GUARD_S,
    ScriptedEngine,
    finish,
    info,
    listening,
    socket_folder,
    step_output,
)

CANARY = 4_095_007


class ManualClock:
    """Stands still until told; sleepers wake when their moment has come."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        self._sleepers.append((self._now + seconds, event))
        await event.wait()

    def advance(self, seconds: float) -> None:
        self._now += seconds
        for due, event in self._sleepers:
            if due <= self._now:
                event.set()


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
    client = EngineClient(f"unix:{folder / 'engine'}", client_name="front")
    await client.start()
    async with asyncio.timeout(HANG_GUARD_S):
        await client.serving()
    yield client
    await client.close()


async def state_of(client: EngineClient, wanted: ClientState) -> None:
    """Wait until the client is in a state."""
    reached = asyncio.Event()

    async def listener(state: ClientState) -> None:
        if state is wanted:
            reached.set()

    client.on_state(listener)
    if client.state is not wanted:
        async with asyncio.timeout(HANG_GUARD_S):
            await reached.wait()


async def failure(stream: RequestStream) -> ApiError:
    """Wait until a request has failed."""
    async with asyncio.timeout(HANG_GUARD_S):
        while stream.error is None:
            await stream.changed()
    return stream.error


async def test_greets_and_learns_what_is_served(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if the client skips hello or doesn't keep the welcome's info."""
    session = await engine.session()
    await session.until(lambda: session.hello is not None)
    assert session.hello == pb.Hello(protocol_version=1, client_name="front")
    assert client.info == engine.info
    assert client.state is ClientState.SERVING


async def test_requests_of_one_turn_share_a_message(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if every add is a message of its own, or if n sequences don't claim n numbers."""
    session = await engine.session()
    await session.until(lambda: session.messages == 1)
    requests = [TextRequest([1, 2], Sampling(n=3)), TextRequest([3]), TextRequest([4])]
    streams = [await client.submit(request) for request in requests]
    await session.next_add(3)
    assert [add.number for add in session.adds] == [1, 4, 5] == [stream.number for stream in streams]
    assert session.messages == 2


async def test_an_abort_before_the_send_sends_nothing(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a request that never left is sent anyway, or aborted in the engine core."""
    session = await engine.session()
    gone = await client.submit(TextRequest([1]))
    client.abort(gone)
    await client.submit(TextRequest([2]))
    add = await session.next_add()
    assert (add.number, session.aborts) == (2, [])
    assert client.open_sequences == 1


async def test_aborts_are_sent_once(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if abort isn't idempotent, forgets a sequence of n, or aborts one that has finished."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1], Sampling(n=3)))
    await session.next_add()
    await session.send(finishes=[finish(2)])
    while not stream.ready:
        await stream.changed()
    client.abort(stream)
    client.abort(stream)
    await client.submit(TextRequest([2]))
    await session.next_add(2)
    assert session.aborts == [1, 3]


async def test_acknowledges_before_the_bound_and_not_every_step(folder: Path) -> None:
    """Red if acks come with every output, or so late that the engine core would end the session."""
    served = info()
    served.limits.max_unacked_bytes = 4000
    engine = ScriptedEngine(served)
    async with listening(engine, folder / "engine") as address:
        client = EngineClient(address)
        await client.start()
        await client.serving()
        session = await engine.session()
        stream = await client.submit(TextRequest([1]))
        await session.next_add()
        for token in range(300):  # about 20 bytes each
            await session.send(tokens=[(1, token)])
            await session.until(lambda: (session.sent - session.ack) * 20 < 4000)
        await session.send(finishes=[finish(1)])
        await session.until(lambda: session.ack == 301)
        assert session.acks < 60
        while not (stream.ready and stream.sequences[0].finished):
            await stream.changed()
        assert stream.sequences[0].tokens == list(range(300))
        await client.close()


async def test_a_heartbeat_is_answered_with_what_is_unacknowledged(
    client: EngineClient, engine: ScriptedEngine
) -> None:
    """Red if an idle session leaves its last output unacknowledged while requests are open."""
    session = await engine.session()
    await client.submit(TextRequest([1]))
    await session.next_add()
    await session.send(tokens=[(1, 5)])
    await session.write(pb.SessionResponse())
    await session.until(lambda: session.ack == 1)


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


async def test_without_a_session_requests_are_refused(folder: Path) -> None:
    """Red if a request waits for an engine core that isn't there, or if a refused connection ends the client."""
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
    engine = ScriptedEngine(info())
    async with listening(engine, folder / "engine"):
        await engine.session()
        await state_of(client, ClientState.SERVING)
    await state_of(client, ClientState.DEAD)
    await client.close()
    assert client.state is ClientState.CLOSED


async def test_silence_ends_the_session(folder: Path, engine: ScriptedEngine) -> None:
    """Red if a frozen engine core keeps requests waiting, or if a heartbeat doesn't count as a sign of life."""
    clock = ManualClock()
    client = EngineClient(f"unix:{folder / 'engine'}", engine_timeout=5.0, clock=clock)
    await client.start()
    await client.serving()
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()
    clock.advance(4.5)
    await session.send(tokens=[(1, 5)])
    while not stream.ready:
        await stream.changed()
    clock.advance(0.6)  # 5.1 s since the welcome, 0.6 since the token
    for _ in range(20):
        await asyncio.sleep(0)
    assert (client.state, stream.error) == (ClientState.SERVING, None)
    clock.advance(4.5)
    error = await failure(stream)
    assert (error.code, "silent" in error.message) == (Code.UNAVAILABLE, True)
    await client.close()


async def test_a_late_timer_is_no_proof_of_silence(folder: Path, engine: ScriptedEngine) -> None:
    """Red if a frontend that was itself frozen for a minute blames the engine core before reading on."""
    clock = ManualClock()
    client = EngineClient(f"unix:{folder / 'engine'}", engine_timeout=5.0, clock=clock)
    await client.start()
    await client.serving()
    clock.advance(60.0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert client.state is ClientState.SERVING
    clock.advance(5.0)
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


async def test_an_unread_answer_is_bounded(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a reader that never reads makes the frontend keep everything, or if one big message alone fails it."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1], Sampling(n=128, logprobs=20)))
    assert stream.unread_limit == 256
    await session.next_add()
    await session.send(tokens=[(1, 7)] * 1000)
    await session.send(tokens=[(2, 7)])
    while len(stream.ready) < 2:
        await stream.changed()
    assert stream.error is None
    await session.send(tokens=[(1, 7)])
    assert (await failure(stream)).code is Code.RESOURCE_EXHAUSTED
    await session.until(lambda: sorted(session.aborts) == list(range(1, 129)))


async def test_the_other_calls(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a pass-through calls the wrong method."""
    assert await client.calls.get_info() == engine.info
    assert (await client.calls.get_stats()).uptime_s == 1.0


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


async def test_close_fails_what_is_open(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if stopping the frontend leaves a reader waiting."""
    stream = await client.submit(TextRequest([1]))
    await client.close()
    assert (await failure(stream)).code is Code.UNAVAILABLE
    with pytest.raises(ApiError):
        await client.calls.get_stats()


async def test_long_prompts_arrive_hashed(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a prompt beyond the inline bound loses its order, its hashes or its place."""
    session = await engine.session()
    prompt = [index % 4096 for index in range(20_000)]
    stream = await client.submit(TextRequest(prompt))
    add = await session.next_add()
    assert np.frombuffer(add.prompt_ids, "<i4").tolist() == prompt
    assert len(add.prefix_hashes) == 32 * (20_000 // 16)
    assert stream.number == add.number


async def test_a_message_at_the_limit_arrives_and_one_beyond_ends_the_session(
    client: EngineClient, engine: ScriptedEngine
) -> None:
    """Case 20. Red if the client's own limit is below the contract's, or an oversized message is let in."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()
    await session.send(tokens=[(1, 7)] * 87_000)  # 12 bytes each
    while not stream.ready:
        await stream.changed()
    assert len(stream.sequences[0].tokens) == 87_000
    oversized = asyncio.create_task(session.send(tokens=[(1, 7)] * 88_000))
    assert (await failure(stream)).code is Code.UNAVAILABLE
    await asyncio.gather(oversized, return_exceptions=True)  # the client may leave before it is written
    await engine.session()


async def test_a_fault_of_our_own_fails_the_requests(
    client: EngineClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red if an unforeseen exception in the reading task leaves requests waiting for ever."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()

    def broken(self: Session, output: pb.StepOutput) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(Session, "_apply", broken)
    await session.send(tokens=[(1, 7)])
    error = await failure(stream)
    assert (error.code, "ZeroDivisionError" in error.message) == (Code.UNAVAILABLE, True)
    await engine.session()


async def test_a_listener_that_fails_holds_nothing_up(client: EngineClient, engine: ScriptedEngine) -> None:
    """Red if a broken health service keeps requests from failing."""
    session = await engine.session()
    stream = await client.submit(TextRequest([1]))
    await session.next_add()

    async def broken(state: ClientState) -> None:
        raise RuntimeError(state.value)

    client.on_state(broken)
    session.end()
    assert (await failure(stream)).code is Code.UNAVAILABLE
    await engine.session()


async def test_logs_hold_no_prompt(
    client: EngineClient, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Red if a log line holds what a client sent."""
    caplog.set_level(logging.DEBUG)
    session = await engine.session()
    stream = await client.submit(TextRequest([CANARY % 4096] * 50, label="canary-label", cache_salt="canary-salt"))
    await session.next_add()
    session.end(grpc.StatusCode.INTERNAL, "broken")
    await failure(stream)
    await engine.session()
    text = caplog.text
    assert "broken" in text
    assert "canary" not in text
    assert str(CANARY % 4096) not in text
