"""The gRPC service over real channels with a scripted engine behind it: sessions, health, limits, statuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from greenlane.engine.v1 import engine_pb2 as pb
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine_core.errors import ConfigError, EngineDead
from engine_core.health import Health
from engine_core.request import Abort, Output, Request
from engine_core.server import bind, build_server
from engine_core.service import ENGINE_SERVICE, MAX_SESSIONS, EngineService
from tests.unit.served_engine import (
    GUARD_S,
    HELLO,
    INFO,
    LIMITS,
    NOT_SERVING,
    SERVING,
    Rig,
    ScriptedCore,
    add,
    engine_rig,
    guarded,
    status_of,
)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with engine_rig(tmp_path) as rig:
        yield rig


@pytest.fixture
async def serving(rig: Rig) -> Rig:
    await rig.service.serve(LIMITS, INFO)
    return rig


# ------------------------------ a session


async def test_requests_go_in_and_outputs_come_back(serving: Rig) -> None:
    """Red when commands or outputs take a wrong way between stream and engine."""
    call = await serving.open()
    await call.write(add(1))
    await call.write(pb.SessionRequest(aborts=np.array([1], "<u8").tobytes()))
    await serving.until(lambda: len(serving.core.commands) == 2)
    request, abort = serving.core.commands
    assert isinstance(request, Request)
    assert abort == Abort(request.session, (1,))
    serving.service.deliver([Output(request.session, 4, accepted=[1])])
    message = await guarded(call.read())
    assert (message.output.sequence, message.output.step) == (1, 4)


class _SlowContext:
    """A call whose writes take a while, and that takes no status while one is under way, as gRPC's."""

    def __init__(self) -> None:
        self.writing = False
        self.status: grpc.StatusCode | None = None

    async def write(self, message: pb.SessionResponse) -> None:
        self.writing = True
        await asyncio.sleep(0.02)
        self.writing = False

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert not self.writing
        self.status = code
        raise grpc.aio.AbortError


async def test_a_violation_while_a_write_is_under_way_ends_with_its_status(serving: Rig) -> None:
    """Red when the write is given up and the call left open, or another write begins behind it."""

    async def twice() -> AsyncIterator[pb.SessionRequest]:
        yield HELLO
        yield HELLO
        await asyncio.Event().wait()

    context = _SlowContext()
    with pytest.raises(grpc.aio.AbortError):
        await guarded(serving.service.Session(twice(), cast(Any, context)))
    assert context.status is grpc.StatusCode.INVALID_ARGUMENT


async def test_closing_the_stream_aborts_its_requests(serving: Rig) -> None:
    """Red when a client that leaves, politely or not, leaves its requests decoding (cases 1, 4)."""
    polite, rude = await serving.open(), await serving.open()
    await polite.done_writing()
    await serving.until(lambda: serving.core.closed() == [1])
    rude.cancel()
    await serving.until(lambda: serving.core.closed() == [1, 2])
    serving.service.deliver([Output(1, 1, accepted=[1]), Output(2, 1, accepted=[1])])
    assert (await guarded(serving.engine.GetStats(pb.GetStatsRequest()))).gauges.sessions == 0


class Lost:
    """The context of a call whose client is killed while something is written to it: gRPC fails the write."""

    async def write(self, message: pb.SessionResponse) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')


async def test_a_client_that_is_lost_within_a_write_is_no_failure(
    serving: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Red if a frontend killed at the wrong moment is logged as an internal error of the engine core."""

    async def silence() -> AsyncIterator[pb.SessionRequest]:
        yield HELLO
        await asyncio.Event().wait()

    service: Any = serving.service
    await guarded(service.Session(silence(), Lost()))
    assert serving.core.closed() == [1]
    assert "call_failed" not in caplog.text


async def test_a_protocol_violation_ends_one_session_only(serving: Rig) -> None:
    """Red when a ragged column is served, or takes a neighbour's session with it."""
    bad, good = await serving.open(), await serving.open()
    await bad.write(pb.SessionRequest(adds=[pb.AddRequest(number=1, prompt_ids=b"\0\0\0")]))
    code, details = await status_of(bad)
    assert (code, "prompt_ids has 3 bytes" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert serving.core.closed() == [1]
    await good.write(add(1))
    await serving.until(lambda: len(serving.core.commands) == 2)


async def test_a_malformed_message_is_its_clients_fault(serving: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Red if bytes that are no message end as an internal error with a traceback, or cost another session."""
    good = await serving.open()
    channel: Any = serving.channel
    bad = channel.stream_stream("/greenlane.engine.v1.Engine/Session")()
    await bad.write(b"\xff" * 9)
    code, details = await status_of(bad)
    assert (code, "malformed" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert "call_failed" not in caplog.text
    await good.write(add(1))
    await serving.until(lambda: len(serving.core.commands) == 2)


async def test_a_refusal_comes_back_and_is_counted(serving: Rig) -> None:
    """Red when a refusal at the edge breaks the session or isn't in the counters."""
    call = await serving.open()
    await call.write(pb.SessionRequest(adds=[pb.AddRequest(number=1)]))
    message = await guarded(call.read())
    assert message.output.finishes[0].error.reject_reason == pb.REJECT_REASON_EMPTY_PROMPT
    serving.core.fields = {"sequences_rejected": 2}
    assert (await serving.engine.GetStats(pb.GetStatsRequest())).counters.sequences_rejected == 3
    call.cancel()
    await serving.until(lambda: serving.core.closed() == [1])
    assert (await serving.engine.GetStats(pb.GetStatsRequest())).counters.sequences_rejected == 3


async def test_an_oversized_message_costs_its_stream_and_nothing_else(serving: Rig) -> None:
    """Red when the limit isn't 1 MiB, or a larger message takes the connection down (case 20)."""
    call, neighbour = await serving.open(), await serving.open()
    await call.write(add(1, count=(1 << 18) - 64))
    await serving.until(lambda: len(serving.core.commands) == 1)
    await call.write(add(2, count=1 << 18))
    code, _ = await status_of(call)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert serving.core.closed() == [1]
    assert serving.channel.get_state() is grpc.ChannelConnectivity.READY
    await neighbour.write(add(1))
    await serving.until(lambda: len(serving.core.commands) == 3)


async def test_a_client_that_reads_nothing_is_cut_off(serving: Rig) -> None:
    """Red when a frozen frontend's outputs pile up, or its session's place and requests are never freed."""
    call = await serving.open()
    row = np.arange(4096, dtype=np.uint64)
    for step in range(1, 200):
        serving.service.deliver([Output(1, step, numbers=row, tokens=row.astype(np.int32))])
        await asyncio.sleep(0)
    await serving.until(lambda: serving.core.closed() == [1])
    assert (await guarded(serving.engine.GetStats(pb.GetStatsRequest()))).gauges.sessions == 0
    code, details = await status_of(call)
    assert (code, "acknowledge faster" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


async def test_a_silent_session_hears_heartbeats(serving: Rig) -> None:
    """Red when an idle core can't be told from a frozen one, or a busy while before makes its heartbeats late."""
    call = serving.engine.Session()
    hello = pb.Hello(protocol_version=1, heartbeat_s=0.2)
    await call.write(pb.SessionRequest(hello=hello))
    assert (await guarded(call.read())).HasField("welcome")
    await asyncio.sleep(0.1)
    serving.service.deliver([Output(1, 1, accepted=[1])])
    assert (await guarded(call.read())).HasField("output")
    began = time.monotonic()
    for _ in range(5):
        assert await guarded(call.read()) == pb.SessionResponse()
    assert time.monotonic() - began > 0.9


async def test_the_number_of_sessions_is_bounded(serving: Rig) -> None:
    """Red when a burst of connections takes places without end, or a freed place isn't given again (case 18)."""
    calls = [await serving.open() for _ in range(MAX_SESSIONS)]
    code, _ = await status_of(serving.engine.Session())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    calls[0].cancel()
    await serving.until(lambda: serving.core.closed() == [1])
    await serving.open()


async def test_a_full_inbox_stops_the_reading(serving: Rig) -> None:
    """Red when commands pile up before an engine thread that can't keep up."""
    call = await serving.open()
    serving.core.crowded = True
    for number in range(1, 50):
        await call.write(add(number))
    await guarded(serving.engine.GetStats(pb.GetStatsRequest()))
    assert len(serving.core.commands) == 1
    serving.core.crowded = False
    await serving.until(lambda: len(serving.core.commands) == 49)


# ------------------------------ states


async def test_nothing_is_served_before_the_engine_is_ready(rig: Rig) -> None:
    """Red when sessions come in while the model loads, or GetInfo doesn't answer then."""
    code, details = await status_of(rig.engine.Session())
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the engine core is starting")
    info = await rig.engine.GetInfo(pb.GetInfoRequest())
    assert (info.state, info.model) == (pb.ENGINE_STATE_STARTING, "tiny")
    check = await rig.health.Check(health_pb2.HealthCheckRequest(service=ENGINE_SERVICE))
    assert check.status == NOT_SERVING


async def test_health_is_watched_through_a_life(rig: Rig) -> None:
    """Red when a turn of life isn't told to a watcher, or is told twice."""
    watch = rig.health.Watch(health_pb2.HealthCheckRequest())
    assert (await guarded(watch.read())).status == NOT_SERVING
    await rig.service.serve(LIMITS, INFO)
    assert (await guarded(watch.read())).status == SERVING
    assert await rig.service.drain(5.0) == (3, 1)
    assert (await guarded(watch.read())).status == NOT_SERVING
    await rig.service.die("cause")
    unknown = rig.health.Watch(health_pb2.HealthCheckRequest(service="other"))
    assert (await guarded(unknown.read())).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_that_leaves_takes_no_other_with_it(serving: Rig) -> None:
    """Red with grpcio's own asyncio servicer: the second watcher would never hear again."""
    first, second = (serving.health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2))
    for watch in (first, second):
        assert (await guarded(watch.read())).status == SERVING
    first.cancel()
    await guarded(serving.engine.GetInfo(pb.GetInfoRequest()))
    await serving.service.die("cause")
    assert (await guarded(second.read())).status == NOT_SERVING


async def test_watchers_are_told_before_sessions_fail(serving: Rig) -> None:
    """Red when `die` returns before the change of health has been written to the watchers."""
    watch = serving.health.Watch(health_pb2.HealthCheckRequest())
    assert (await guarded(watch.read())).status == SERVING
    call = await serving.open()
    order: list[str] = []

    async def watched() -> None:
        assert (await watch.read()).status == NOT_SERVING
        order.append("health")

    async def failed() -> None:
        while not (await call.read()).HasField("output"):
            pass
        order.append("failure")

    waiting = [asyncio.create_task(watched()), asyncio.create_task(failed())]
    await serving.service.die("cause")
    serving.service.deliver([Output(1, 1, accepted=[1])])
    await guarded(asyncio.gather(*waiting))
    assert order == ["health", "failure"]


async def test_a_dead_engine_says_why(serving: Rig) -> None:
    """Red when a session after a fail-stop is told nothing, or one before it isn't ended."""
    call = await serving.open()
    await serving.service.die("worker 0 was killed by SIGKILL")
    code, details = await status_of(serving.engine.Session())
    assert (code, "killed by SIGKILL" in details) == (grpc.StatusCode.UNAVAILABLE, True)
    assert await serving.service.settle(GUARD_S)
    serving.service.end_sessions("over")
    assert await status_of(call) == (grpc.StatusCode.UNAVAILABLE, "over")


async def test_settling_waits_for_acknowledgement(serving: Rig) -> None:
    """Red when the process ends while a client's last words are still on the way."""
    call = await serving.open()
    serving.service.deliver([Output(1, 1, accepted=[1])])
    message = await guarded(call.read())
    assert not await serving.service.settle(0.0)
    await call.write(pb.SessionRequest(ack=message.output.sequence))
    assert await serving.service.settle(GUARD_S)


# ------------------------------ unary calls


async def test_drain_and_flush_answer_with_counts(serving: Rig) -> None:
    """Red when the default time cap isn't 30 s, or the answers are mixed up."""
    answer = await serving.engine.Drain(pb.DrainRequest())
    assert (answer.finished, answer.aborted, serving.core.drained) == (3, 1, [30.0])
    await serving.engine.Drain(pb.DrainRequest(timeout_s=0.0))
    assert serving.core.drained == [30.0, 0.0]
    assert (await serving.engine.FlushCache(pb.FlushCacheRequest())).pages_dropped == 5
    code, details = await status_of(serving.engine.Session())
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the engine core is draining")


async def test_a_core_that_is_starting_is_not_drained(rig: Rig) -> None:
    """Red when Drain answers OK and the core serves all the same once its model is loaded."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.engine.Drain(pb.DrainRequest())
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.UNAVAILABLE,
        "the engine core is starting",
    )
    assert (await rig.engine.GetInfo(pb.GetInfoRequest())).state == pb.ENGINE_STATE_STARTING


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), 1e9])
async def test_a_senseless_drain_time_is_refused(serving: Rig, timeout_s: float) -> None:
    """Red when NaN or a negative cap reaches the timer."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await serving.engine.Drain(pb.DrainRequest(timeout_s=timeout_s))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert serving.core.drained == []


async def test_stats_are_the_engines_by_name(serving: Rig) -> None:
    """Red when a gauge or counter is copied to another's place."""
    names = [field.name for message in (pb.Gauges, pb.Counters) for field in message.DESCRIPTOR.fields]
    serving.core.fields = {name: place for place, name in enumerate(names, 100) if name != "sessions"}
    answer = await serving.engine.GetStats(pb.GetStatsRequest())
    seen = {field.name: value for part in (answer.gauges, answer.counters) for field, value in part.ListFields()}
    assert seen == serving.core.fields
    assert answer.state == pb.ENGINE_STATE_SERVING


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (EngineDead("the engine has ended"), grpc.StatusCode.UNAVAILABLE, "the engine has ended"),
        (RuntimeError("secret detail"), grpc.StatusCode.INTERNAL, "internal error of the engine core; see its log"),
    ],
)
async def test_errors_become_statuses(serving: Rig, error: Exception, code: grpc.StatusCode, text: str) -> None:
    """Red when an unexpected error's text reaches a client, or a dead engine looks like a bug."""
    serving.core.error = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await serving.engine.GetStats(pb.GetStatsRequest())
    assert (caught.value.code(), caught.value.details()) == (code, text)


async def test_the_server_reflects_its_services(serving: Rig) -> None:
    """Red when grpcurl can't discover the services."""
    stub = reflection_pb2_grpc.ServerReflectionStub(serving.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    answer = await guarded(call.read())
    names = {service.name for service in answer.list_services_response.service}
    assert {ENGINE_SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    """Red when SO_REUSEPORT lets two engine cores share a port, or the error isn't a ConfigError (case 12)."""
    health = Health(ENGINE_SERVICE)
    service = EngineService(ScriptedCore(), health, INFO, draw_seed=lambda: 1)
    first, second = build_server(service, health), build_server(service, health)
    address = bind(first, "127.0.0.1:0")
    await first.start()
    port = int(address.rpartition(":")[2])
    assert port > 0
    with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}"):
        bind(second, f"127.0.0.1:{port}")
    await first.stop(0)
    await second.stop(0)
