"""The engine core's gRPC service: sessions, information, statistics and drain.

Owns the streams of open sessions, and the place where errors
become gRPC statuses (`_statuses`). The session protocol itself is `session.py`'s; the engine is reached through `Core`.
Runs on one asyncio loop; `deliver` must be called there.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from greenlane.engine.v1 import engine_pb2 as pb
from greenlane.engine.v1 import engine_pb2_grpc

from engine_core import cache_stream
from engine_core import session as protocol
from engine_core.cache.watch import CacheWatch
from engine_core.errors import EngineDead, StatusCode
from engine_core.health import NOT_SERVING, SERVING, Health
from engine_core.log import event
from engine_core.request import Command, ModelLimits, Output
from engine_core.session import SessionBroken
from engine_core.session_stream import SessionStream
from engine_core.spans import EngineSpans

log = logging.getLogger(__name__)

ENGINE_SERVICE = pb.DESCRIPTOR.services_by_name["Engine"].full_name
MAX_SESSIONS = 64
MAX_WATCHES = 16
"""Readers of the prefix cache's changes at a time: each costs a little at every change."""
SETTLE_POLL_S = 0.01
LAST_WRITE_S = 0.5
"""For a write that is under way when its session ends."""
DRAIN_CAP_S = 30.0
"""Of a Drain call that names none."""
MAX_DRAIN_S = 3600.0
STATUS = {code.value[0]: code for code in grpc.StatusCode}

Context = grpc.aio.ServicerContext[Any, Any]
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Method = Callable[["EngineService", Asked, Context], Coroutine[Any, Any, Answer]]


class State(enum.IntEnum):
    """Values of greenlane.engine.v1.EngineState."""

    STARTING = 1
    SERVING = 2
    DRAINING = 3
    DEAD = 4


class Core(cache_stream.Core, Protocol):
    """What the service needs of the engine thread. `submit` never blocks."""

    def submit(self, commands: Iterable[Command]) -> None:
        """Hand commands over, in order."""

    async def room(self) -> None:
        """Wait while the engine thread has too many commands still to take."""

    async def stats(self) -> Any:
        """An object with the fields of engine.proto's Gauges and Counters (but `sessions`), or None before there is
        an engine."""

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Stop admission, let open sequences finish; (finished, aborted by the cap)."""

    async def flush_cache(self) -> int:
        """Drop unreferenced prefix-cache pages; how many."""

    async def watch_cache(self) -> CacheWatch:
        """Begin to note the prefix cache's changes. Raises EngineDead without an engine."""

    def unwatch_cache(self, watch: CacheWatch) -> None:
        """Note nothing more for it. Never blocks."""


def _statuses(method: Method[Asked, Answer]) -> Method[Asked, Answer]:
    """Errors become gRPC statuses here and nowhere else; one that nobody expected is INTERNAL, its text only logged."""

    @functools.wraps(method)
    async def wrapped(self: EngineService, request: Asked, context: Context) -> Answer:
        try:
            return await method(self, request, context)
        except SessionBroken as broken:
            await context.abort(STATUS[int(broken.code)], broken.message)
        except EngineDead as dead:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(dead))
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("call_failed", extra={"fields": {"method": method.__name__}})
            await context.abort(grpc.StatusCode.INTERNAL, "internal error of the engine core; see its log")

    return wrapped


async def _well_formed(messages: AsyncIterator[pb.SessionRequest]) -> AsyncIterator[pb.SessionRequest]:
    """The messages; raises SessionBroken for bytes that are none."""
    try:
        async for message in messages:
            yield message
    except DecodeError:
        raise SessionBroken(StatusCode.INVALID_ARGUMENT, "a message is malformed: no SessionRequest") from None


class EngineService(engine_pb2_grpc.EngineServicer):
    """The Engine servicer. Starts in STARTING; `serve`, `drain` and `die` move it on."""

    def __init__(
        self,
        core: Core,
        health: Health,
        info: pb.GetInfoResponse,
        *,
        draw_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        max_unacked_bytes: int = protocol.MAX_UNACKED_BYTES,
        spans: EngineSpans | None = None,
    ) -> None:
        self.state = State.STARTING
        self._spans = spans
        self._core = core
        self._health = health
        self._info = info
        self._limits: ModelLimits | None = None
        self._draw_seed = draw_seed
        self._clock = clock
        self._started = clock()
        self._max_unacked_bytes = max_unacked_bytes
        self._streams: dict[int, SessionStream] = {}
        self._sessions_opened = 0
        self._watches = 0
        self._ended = asyncio.Event()
        """The engine is dead or stopped: nothing of its cache changes any more."""
        self._rejected = 0
        self._cause = ""

    # -------------------------- life

    async def serve(self, limits: ModelLimits, info: pb.GetInfoResponse) -> None:
        """The engine is ready: sessions may come."""
        self._limits = limits
        self._info = info
        self.state = State.SERVING
        await self._health.set(SERVING)

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Refuse new sessions and requests, let open ones finish; (finished, aborted). Health turns first."""
        if self.state is State.SERVING:
            self._turn(State.DRAINING)
        await self._health.set(NOT_SERVING)
        return await self._core.drain(timeout_s)

    async def die(self, cause: str) -> None:
        """The engine is dead: when this returns, health says so; sessions still get what is delivered."""
        self._turn(State.DEAD)
        self._cause = cause
        self._ended.set()
        await self._health.set(NOT_SERVING)

    def _turn(self, state: State) -> None:
        """Change the state and have every session hear of it."""
        self.state = state
        for stream in self._streams.values():
            stream.session.tell_state(state)
            stream.changed.set()

    def deliver(self, outputs: list[Output]) -> None:
        """Hand the outputs of an engine step to their sessions. A session that is gone gets nothing more."""
        for output in outputs:
            stream = self._streams.get(output.session)
            if stream is None:
                continue
            if self._spans is not None:
                self._spans.published(output)
            try:
                stream.session.publish(output)
            except SessionBroken as broken:
                stream.end(broken)
            stream.changed.set()

    async def settle(self, timeout_s: float) -> bool:
        """Wait until every client has acknowledged everything, or the time is over; whether they all have."""
        deadline = self._clock() + timeout_s
        while not all(stream.session.settled for stream in self._streams.values()):
            if self._clock() >= deadline:
                return False
            await asyncio.sleep(SETTLE_POLL_S)
        return True

    def end_sessions(self, message: str) -> None:
        """End every open session, and every reader of the cache's changes, with UNAVAILABLE."""
        self._ended.set()
        for stream in self._streams.values():
            stream.end(SessionBroken(StatusCode.UNAVAILABLE, message))

    # -------------------------- Session

    @_statuses
    async def Session(self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context) -> None:
        stream = self._open()
        session = stream.session
        try:
            await self._converse(stream, request_iterator, context)
        finally:
            del self._streams[session.number]
            stream.close()
            self._rejected += session.rejected
            self._core.submit([session.close()])
            if self._spans is not None:
                self._spans.closed(session.number)
            event(log, logging.INFO, "session_closed", session=session.number, client=session.client_name)

    def _open(self) -> SessionStream:
        """A place among the bounded number of sessions; raises SessionBroken when there is none."""
        if self.state is not State.SERVING or self._limits is None:
            raise SessionBroken(StatusCode.UNAVAILABLE, self._unavailable())
        if len(self._streams) >= MAX_SESSIONS:
            raise SessionBroken(
                StatusCode.RESOURCE_EXHAUSTED, f"{MAX_SESSIONS} sessions are open, the most there may be"
            )
        self._sessions_opened += 1
        session = protocol.Session(
            self._sessions_opened,
            self._limits,
            self._stamped_info(),
            now=self._clock(),
            draw_seed=self._draw_seed,
            max_unacked_bytes=self._max_unacked_bytes,
            on_refused=None if self._spans is None else self._spans.published,
        )
        stream = self._streams[session.number] = SessionStream(session)
        event(log, logging.INFO, "session_opened", session=session.number, open=len(self._streams))
        return stream

    def _unavailable(self) -> str:
        if self.state is State.DEAD:
            return f"the engine core has failed: {self._cause}"
        return f"the engine core is {self.state.name.lower()}"

    async def _converse(
        self, stream: SessionStream, messages: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        """Read and write until the client leaves or the session ends; raises SessionBroken for the latter."""
        reader = asyncio.create_task(self._read(stream, messages))
        ends: list[asyncio.Future[None]] = [stream.ended, reader, asyncio.create_task(self._write(stream, context))]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stream.leaving = True
            reader.cancel()
            with contextlib.suppress(TimeoutError):  # gRPC takes no status while a write is under way
                await asyncio.wait_for(stream.idle.wait(), LAST_WRITE_S)
        finally:
            for end in ends:
                end.cancel()
        for end in done:
            end.result()

    async def _read(self, stream: SessionStream, messages: AsyncIterator[pb.SessionRequest]) -> None:
        """The client's messages become commands, until it closes its side."""
        async for message in _well_formed(messages):
            if self._spans is not None:
                self._spans.asked(stream.session.number, message.adds)
            commands = stream.session.receive(message, self._clock())
            if commands:
                self._core.submit(commands)
            stream.changed.set()
            await self._core.room()

    async def _write(self, stream: SessionStream, context: Context) -> None:
        """One write outstanding; what comes meanwhile merges into the next. Returns when the client has gone.

        Raises SessionBroken when its hello doesn't come.
        """
        session = stream.session
        while True:
            now = self._clock()
            message = session.take(now)
            if message is None:
                stream.changed.clear()
                stream.wake_by(session.due(now), now)
                await stream.changed.wait()
            else:
                stream.idle.clear()
                try:
                    await context.write(message)
                except grpc.aio.InternalError:  # it left, or was killed, with this write under way
                    return
                finally:
                    stream.idle.set()
                if stream.leaving:
                    return
                session.written(self._clock())

    # -------------------------- unary calls

    @_statuses
    async def GetInfo(self, request: pb.GetInfoRequest, context: Context) -> pb.GetInfoResponse:
        return self._stamped_info()

    def _stamped_info(self) -> pb.GetInfoResponse:
        info = pb.GetInfoResponse()
        info.CopyFrom(self._info)
        info.MergeFrom(pb.GetInfoResponse(state=pb.EngineState.Name(self.state)))
        return info

    @_statuses
    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        response = pb.GetStatsResponse(
            state=pb.EngineState.Name(self.state), uptime_s=self._clock() - self._started, lanes=self._info.lanes
        )
        stats = await self._core.stats()
        if stats is not None:
            for part in (response.gauges, response.counters):
                for field in part.DESCRIPTOR.fields:
                    if field.name != "sessions":
                        setattr(part, field.name, getattr(stats, field.name))
        response.gauges.sessions = len(self._streams)
        response.counters.sequences_rejected += self._rejected + sum(
            stream.session.rejected for stream in self._streams.values()
        )
        return response

    @_statuses
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        timeout_s = request.timeout_s if request.HasField("timeout_s") else DRAIN_CAP_S
        if not 0 <= timeout_s <= MAX_DRAIN_S:
            raise SessionBroken(
                StatusCode.INVALID_ARGUMENT, f"timeout_s is {timeout_s!r}; it must be from 0 to {MAX_DRAIN_S:g}"
            )
        if self.state is State.STARTING:  # it would serve all the same once its model is loaded
            raise SessionBroken(StatusCode.UNAVAILABLE, self._unavailable())
        finished, aborted = await self.drain(timeout_s)
        return pb.DrainResponse(finished=finished, aborted=aborted)

    @_statuses
    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        return pb.FlushCacheResponse(pages_dropped=await self._core.flush_cache())

    # -------------------------- the prefix cache

    @_statuses
    async def WatchCache(self, request: pb.WatchCacheRequest, context: Context) -> None:
        if self._limits is None or self._ended.is_set():
            raise SessionBroken(StatusCode.UNAVAILABLE, self._unavailable())
        if self._watches >= MAX_WATCHES:
            raise SessionBroken(
                StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHES} readers watch the cache, the most there may be"
            )
        self._watches += 1
        try:
            watch = await self._core.watch_cache()
            try:
                async for message in cache_stream.changes(self._core, watch, self._limits.page_size, self._ended):
                    await context.write(message)
            finally:
                self._core.unwatch_cache(watch)
        finally:
            self._watches -= 1
        raise SessionBroken(StatusCode.UNAVAILABLE, "the engine core has ended")
