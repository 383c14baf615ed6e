"""The frontend's connection to the engine core: one session at a time, kept alive, renewed when it is lost.

Owns the gRPC channel, the session's reader, writer and watchdog, reconnecting, and the order of bad news: health turns
first, then open requests end with UNAVAILABLE. Resumes nothing: a request belongs to its session. What the messages
mean is `session.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from greenlane.engine.v1 import engine_pb2 as pb
from greenlane.engine.v1 import engine_pb2_grpc

from access.policy import AccessError
from frontend.clock import Clock, SystemClock
from frontend.engine_calls import EngineCalls, Metadata, connection_remedy
from frontend.engine_channel import open_channel, write
from frontend.request import ApiError, Code, TextRequest
from frontend.session import ADD_TURNS, Session, hello
from frontend.streams import RequestStream, Sequence
from frontend.wire import ProtocolViolation, build_add

LISTENER_TIMEOUT_S = 1.0
STATE_TIMEOUT_S = 1.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
STARTING_BACKOFF_S = 0.2
"""Where the engine core says that it is starting: whoever waits for it shouldn't wait for long after it."""
TAKE_IN_S = 0.2
"""For what waits to be read, before silence counts."""
LATE_S = 1.0
"""A timer that fires this late tells that this process stood still, not the engine core."""
INLINE_PROMPT_TOKENS = 16_384
"""Longer prompts are packed and hashed in a worker thread (about 2 ms at this length)."""
TURNS_A_MESSAGE = 6
"""Turns of readers (`session.READERS` each) before the next message is asked for."""
logger = logging.getLogger(__name__)


class ClientState(enum.Enum):
    """What health says: only `SERVING` is healthy."""

    CONNECTING = "connecting"
    """No session yet since the start."""
    STARTING = "starting"
    """The engine core is there and says so."""
    SERVING = "serving"
    DRAINING = "draining"
    """The engine core takes no new requests; open ones go on while the session lasts."""
    DEAD = "dead"
    """The session was lost, or the engine core says that it has failed; reconnecting."""
    CLOSED = "closed"


_TOLD: dict[int, ClientState] = {
    pb.ENGINE_STATE_STARTING: ClientState.STARTING,
    pb.ENGINE_STATE_DRAINING: ClientState.DRAINING,
    pb.ENGINE_STATE_DEAD: ClientState.DEAD,
}
Listener = Callable[[ClientState], Awaitable[None]]


class SessionLost(Exception):
    """The session ended; the message says why, `details` more of it for the log, `state` what the core says it is."""

    def __init__(self, message: str, details: str | None = None, state: ClientState | None = None) -> None:
        super().__init__(message)
        self.details = details
        self.state = state


class EngineClient:
    """Requests to the engine core at one address, and what is known of it."""

    def __init__(
        self,
        address: str,
        *,
        client_name: str = "frontend",
        engine_timeout: float = 5.0,
        clock: Clock | None = None,
        connect: Callable[[str], grpc.aio.Channel] = open_channel,
        metadata: Callable[[], Metadata] = tuple,
    ) -> None:
        """`engine_timeout`: seconds of silence after which the engine core counts as frozen; `metadata`: of every call,
        asked for anew each time."""
        self.state = ClientState.CONNECTING
        self.info: pb.GetInfoResponse | None = None
        """The newest welcome's; None before the first."""
        self.lost_reason = "no connection yet"
        """Why there is no session, for people."""
        self.fail_stops = 0
        """Times that the engine core said it had failed."""
        self.sessions_lost = 0
        self._address = address
        self._client_name = client_name
        self._engine_timeout = engine_timeout
        self._clock = clock or SystemClock()
        self._connect = connect
        self._metadata = metadata
        self._listeners: list[Listener] = []
        self.calls = EngineCalls(metadata, self._unavailable)
        """Beside the session, over its channel."""
        self._session: Session | None = None
        self._due = asyncio.Event()
        self._serving = asyncio.Event()
        self._heard = 0.0
        self._runner: asyncio.Task[None] | None = None

    # -------------------------- life

    def on_state(self, listener: Listener) -> None:
        """Call the listener on every change of state; before open requests fail, for at most a second."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Begin to connect, and to reconnect for as long as the client is open."""
        self._runner = asyncio.create_task(self._run(), name="engine session")

    async def serving(self) -> None:
        """Wait until there is a session."""
        await self._serving.wait()

    async def close(self) -> None:
        """End the session; open requests end with UNAVAILABLE."""
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner
        await self._lose(ClientState.CLOSED, "the server was stopped before the request had ended")

    # -------------------------- requests

    async def submit(self, request: TextRequest) -> RequestStream:
        """Send a request. Raises ApiError: UNAVAILABLE without a session, and what `wire.build_add` refuses."""
        session = self._ready_session()
        build = (request, session.info.page_size, session.max_add_bytes)
        if len(request.prompt_ids) <= INLINE_PROMPT_TOKENS:
            return session.add(build_add(*build))
        add = await asyncio.to_thread(build_add, *build)
        if session is not self._session:  # lost meanwhile; the next one may have another page size
            raise self._unavailable()
        return session.add(add)

    def abort(self, stream: RequestStream) -> None:
        """End what is open of a request. Idempotent; safe after the session ended."""
        if self._session is not None:
            self._session.abort(stream)

    def abort_sequence(self, sequence: Sequence) -> None:
        """End one of a request's sequences. Idempotent; safe after the session ended."""
        if self._session is not None:
            self._session.abort_sequence(sequence)

    def watch_cache(self) -> Any:
        """`EngineCalls.watch_cache`."""
        return self.calls.watch_cache()

    @property
    def open_sequences(self) -> int:
        """Sequences that the engine core still works on for this frontend."""
        return 0 if self._session is None else self._session.open_sequences

    def _ready_session(self) -> Session:
        if self._session is None or self.state is not ClientState.SERVING:
            raise self._unavailable()
        return self._session

    def _unavailable(self) -> ApiError:
        return ApiError(
            Code.UNAVAILABLE,
            f"the engine core is not available: {self.lost_reason}; try again later",
            retry_after_s=1.0,
        )

    # -------------------------- the session

    async def _run(self) -> None:
        """Hold a session; when it is lost, tell everybody, wait a little and begin again."""
        backoff = FIRST_BACKOFF_S
        while True:
            state: ClientState | None = None
            try:
                async with self._open() as call:
                    await self._hold(call)
            except (SessionLost, ProtocolViolation) as error:
                reason = str(error)
                if isinstance(error, SessionLost):
                    state = error.state
                    if error.details and self.lost_reason != reason:
                        logger.warning("no connection to the engine core: %s", error.details)
            except Exception as error:  # a fault of ours must not leave requests waiting
                logger.exception("the engine session failed")
                reason = f"the frontend failed to handle its session ({type(error).__name__})"
            had_session = self._session is not None
            unknown = ClientState.DEAD if self.info is not None else ClientState.CONNECTING
            await self._lose(state or unknown, reason)
            most = STARTING_BACKOFF_S if state is ClientState.STARTING else MAX_BACKOFF_S
            backoff = FIRST_BACKOFF_S if had_session else min(2 * backoff, most)
            await self._clock.sleep(backoff)

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[Any]:
        """A channel and a Session call on it; both end with the context."""
        try:
            metadata, self.calls.channel = self._metadata(), self._connect(self._address)
        except AccessError as error:
            raise SessionLost("its certificates or its key can't be read", str(error)) from error
        call = engine_pb2_grpc.EngineStub(self.calls.channel).Session(metadata=metadata)
        try:
            yield call
        except grpc.aio.AioRpcError as error:
            reachable = self.calls.channel.get_state() is grpc.ChannelConnectivity.READY
            if self._session is None and not reachable:  # the details hold addresses: for the log, not for clients
                raise SessionLost(
                    "it can't be reached", f"{error.details()}; {connection_remedy(error.details() or '')}"
                ) from error
            state = None if self._session is not None else await self._ask_state()
            named = " (--engine-api-key-file)" if error.code() is grpc.StatusCode.UNAUTHENTICATED else ""
            raise SessionLost(f"{error.code().name}: {error.details()}{named}", state=state) from error
        finally:
            call.cancel()
            channel, self.calls.channel = self.calls.channel, None
            await channel.close(None)

    async def _ask_state(self) -> ClientState | None:
        """What an engine core that takes no session says it is; None: it doesn't say."""
        try:
            info = await asyncio.wait_for(self.calls.get_info(), STATE_TIMEOUT_S)
        except (ApiError, TimeoutError):
            return None
        return _TOLD.get(info.state)

    async def _hold(self, call: Any) -> None:
        """Read, write and watch until one of them raises."""
        self._heard = self._clock.now()
        tasks = [asyncio.create_task(work) for work in (self._converse(call), self._watch())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _end(tasks)

    async def _converse(self, call: Any) -> None:
        """Greet, then read for ever, with the writer beside.

        Reading doesn't wait for the greeting: a core that takes no session may end the call before it gets away.
        """
        greeting = asyncio.create_task(write(call, hello(self._client_name, self._engine_timeout)))
        try:
            first = await self._read(call)
        finally:
            await _end([greeting])
        if not first.HasField("welcome"):
            raise ProtocolViolation("the engine core's first message is no welcome")
        session = Session(first.welcome, self._due.set)
        self._check_same_model(session.info)
        writer = asyncio.create_task(self._write_all(call, session))
        try:
            await self._serve(session)
            while not writer.done():
                message = await self._next(call, session)
                if message.HasField("state"):
                    await self._note_state(message.state)
                session.receive(message)
            writer.result()
        finally:
            await _end([writer])

    async def _next(self, call: Any, session: Session) -> pb.SessionResponse:
        """The next message, asked for once some readers have their news: those who wait take theirs of it as well.

        Between turns the loop sees to everything else.
        """
        turns = 1
        while (waiting := session.hand_on()) and turns < TURNS_A_MESSAGE:
            await asyncio.sleep(0)
            turns += 1
        session.acknowledge()
        if not waiting:
            return await self._read(call)
        reading = asyncio.create_task(self._read(call))
        try:
            while waiting and not reading.done():
                await asyncio.sleep(0)
                waiting = session.hand_on()
            return await reading
        except BaseException:
            await _end([reading])
            raise

    async def _note_state(self, state: int) -> None:
        """The engine core says what has become of it: health first, then what comes of that."""
        told = _TOLD.get(state)
        if told is not None:
            self.lost_reason = f"it is {told.value}"
            self.fail_stops += told is ClientState.DEAD
            await self._set_state(told)

    async def _read(self, call: Any) -> pb.SessionResponse:
        """The next message. Raises AioRpcError or SessionLost at the end of the call."""
        message: object = await call.read()
        if message is None:  # what gRPC gives for bytes that it can't parse
            raise ProtocolViolation("the engine core sent a malformed message")
        if not isinstance(message, pb.SessionResponse):
            raise SessionLost("the engine core ended the session")
        self._heard = self._clock.now()
        return message

    async def _write_all(self, call: Any, session: Session) -> None:
        """One write outstanding; what becomes due meanwhile, or just behind requests, goes together into the next."""
        while True:
            await self._due.wait()
            self._due.clear()
            while (message := session.take()) is not None:
                await write(call, message)
                for _ in range(ADD_TURNS if message.adds else 0):
                    await asyncio.sleep(0)

    async def _watch(self) -> None:
        """Raise SessionLost after `engine_timeout` of silence: the core was asked for two heartbeats within it.

        This process may itself have stood still: what waits to be read is taken in before the core is judged.
        """
        while True:
            heard, due = self._heard, self._heard + self._engine_timeout
            await self._clock.sleep(max(0.0, due - self._clock.now()))
            if self._heard == heard:
                if self._clock.now() - due > LATE_S:
                    self._heard = self._clock.now()
                    continue
                await self._clock.sleep(TAKE_IN_S)
            if self._heard == heard:
                raise SessionLost(f"the engine core was silent for {self._engine_timeout:g} s")

    def _check_same_model(self, info: pb.GetInfoResponse) -> None:
        """A core that came back with another vocabulary would be served with the wrong tokenizer."""
        before = self.info
        if before is not None and (before.architecture, before.vocab_size) != (info.architecture, info.vocab_size):
            raise ProtocolViolation(
                f"the engine core now serves {info.architecture} with {info.vocab_size} ids, before "
                f"{before.architecture} with {before.vocab_size}: restart this frontend"
            )

    async def _serve(self, session: Session) -> None:
        info = session.info
        logger.info("engine session up: %s, instance %s, model %s", self._address, info.instance_id, info.model)
        self.info = session.info
        self._session = session
        self._due.clear()
        await self._set_state(ClientState.SERVING)
        self._serving.set()

    async def _lose(self, state: ClientState, reason: str) -> None:
        """Health first, then the requests."""
        session = self._session
        if session is None and self.lost_reason != reason and state is not ClientState.CLOSED:
            logger.info("no engine session with %s: %s", self._address, reason)
        elif session is not None and (state is not ClientState.CLOSED or session.open_sequences):
            logger.warning("engine session with %s lost: %s", self._address, reason)
        self.lost_reason = reason
        self._serving.clear()
        await self._set_state(state)
        self._session = None
        if session is not None:
            self.sessions_lost += state is not ClientState.CLOSED
            cause = reason if state is ClientState.CLOSED else f"the engine core was lost: {reason}"
            session.fail(ApiError(Code.UNAVAILABLE, cause, retry_after_s=1.0))

    async def _set_state(self, state: ClientState) -> None:
        if state is self.state:
            return
        self.state = state
        for listener in self._listeners:
            try:
                async with asyncio.timeout(LISTENER_TIMEOUT_S):  # wait_for may swallow a cancellation
                    await listener(state)
            except Exception:
                logger.exception("a listener of the engine state %s failed", state.value)


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel what still runs and take every result, so that no task's exception goes unseen."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
