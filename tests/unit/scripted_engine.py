"""An engine core that says what a test tells it to: a real gRPC server on a Unix socket, no engine behind it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from greenlane.engine.v1 import engine_pb2 as pb
from greenlane.engine.v1 import engine_pb2_grpc

HANG_GUARD_S = 60.0
FIXTURE = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen"


def info(**changes: Any) -> pb.GetInfoResponse:
    """What the scripted engine core serves, with some fields changed."""
    limits = pb.Limits(
        max_model_len=2048, max_num_seqs=256, max_message_bytes=1 << 20, max_unacked_bytes=8 << 20, max_queue=1 << 20
    )
    fields: dict[str, Any] = {
        "state": pb.ENGINE_STATE_SERVING,
        "architecture": "Qwen3ForCausalLM",
        "vocab_size": 4096,
        "page_size": 16,
        "limits": limits,
        "eos_token_ids": [2],
        "instance_id": "one",
    }
    return pb.GetInfoResponse(**(fields | changes))


def pack(values: Iterable[float], dtype: str) -> bytes:
    """A packed column."""
    return np.array(list(values), dtype).tobytes()


def step_output(
    sequence: int,
    *,
    accepted: Iterable[int] = (),
    tokens: Iterable[tuple[int, int]] = (),
    finishes: Iterable[pb.Finish] = (),
    **fields: Any,
) -> pb.StepOutput:
    """A StepOutput; `tokens` are (sequence number, id)."""
    pairs = list(tokens)
    return pb.StepOutput(
        sequence=sequence,
        step=sequence,
        accepted=pack(accepted, "<u8"),
        numbers=pack((number for number, _ in pairs), "<u8"),
        tokens=pack((token for _, token in pairs), "<i4"),
        finishes=list(finishes),
        **fields,
    )


def finish(number: int, reason: str = "STOP", **fields: Any) -> pb.Finish:
    """A sequence's last word."""
    return pb.Finish(number=number, reason=f"FINISH_REASON_{reason}", **fields)


class ScriptedSession:
    """One session as the engine core sees it."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._news = asyncio.Event()
        self._end: asyncio.Future[tuple[grpc.StatusCode, str]] = asyncio.get_running_loop().create_future()
        self.hello: pb.Hello | None = None
        self.adds: list[pb.AddRequest] = []
        self.aborts: list[int] = []
        self.ack = 0
        self.acks = 0
        self.messages = 0
        self.sent = 0

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what the client sent fulfils the condition."""
        async with asyncio.timeout(HANG_GUARD_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def next_add(self, count: int = 1) -> pb.AddRequest:
        """The newest request, once there are `count` of them."""
        await self.until(lambda: len(self.adds) >= count)
        return self.adds[-1]

    async def send(self, **fields: Any) -> None:
        """Write the next StepOutput (see `step_output`)."""
        self.sent += 1
        await self._context.write(pb.SessionResponse(output=step_output(self.sent, **fields)))

    async def write(self, message: pb.SessionResponse | bytes) -> None:
        """Write a message as it is."""
        await self._context.write(message)

    def end(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, details: str = "scripted end") -> None:
        """End the call with a status."""
        self._end.set_result((code, details))

    async def run(self) -> None:
        """Read until the client or the test ends the call."""
        reader = asyncio.create_task(self._read())
        try:
            ends: list[asyncio.Future[Any]] = [reader, self._end]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                await self._context.abort(*self._end.result())
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self) -> None:
        while (message := await self._context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            self._note(message)
            self._news.set()

    def _note(self, message: pb.SessionRequest) -> None:
        self.messages += 1
        if message.HasField("hello"):
            self.hello = message.hello
        self.adds += message.adds
        self.aborts += np.frombuffer(message.aborts, "<u8").tolist()
        if message.HasField("ack"):
            self.ack = message.ack
            self.acks += 1


class ScriptedEngine(engine_pb2_grpc.EngineServicer):
    """The servicer: welcomes every session with `info`, then leaves it to the test."""

    def __init__(self, served: pb.GetInfoResponse) -> None:
        self.info = served
        self.protocol_version = 1
        self.greet = True
        self.refusal = ""
        """Sessions are refused with UNAVAILABLE and this reason, unless it is empty."""
        self.asked = asyncio.Event()
        """GetStats was called; it answers once `stats_answer` is set, as it is at first."""
        self.stats_answer = asyncio.Event()
        self.stats_answer.set()
        self.sessions: asyncio.Queue[ScriptedSession] = asyncio.Queue()

    async def session(self) -> ScriptedSession:
        """The next session that a client opens."""
        async with asyncio.timeout(HANG_GUARD_S):
            return await self.sessions.get()

    async def Session(self, request_iterator: Any, context: Any) -> None:
        if self.refusal:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal)
        session = ScriptedSession(context)
        if self.greet:
            welcome = pb.Welcome(protocol_version=self.protocol_version, info=self.info)
            await context.write(pb.SessionResponse(welcome=welcome))
        self.sessions.put_nowait(session)
        await session.run()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:
        return self.info

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:
        self.asked.set()
        await self.stats_answer.wait()
        return pb.GetStatsResponse(uptime_s=1.0)


@asynccontextmanager
async def listening(engine: engine_pb2_grpc.EngineServicer, path: Path) -> AsyncIterator[str]:
    """The engine core on a Unix socket; gives the address."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 20)])
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    address = f"unix:{path}"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


@asynccontextmanager
async def socket_folder() -> AsyncIterator[Path]:
    """A folder whose path is short enough for Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="greenlane-test-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
