"""Frames between the engine core and a worker: what they hold, how they are numbered and what a broken one means.

Owns the codec and the sequence check; moves no bytes (`executor/zmq.py` does). Whatever can't be decoded, has another
version, or is out of sequence raises ProtocolViolation, which is fail-stop for whoever receives it.

Handshake: worker `Hello` → core `Configure` → worker `Loading`* → worker `Ready` → plans and results.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from engine_core.config import WorkerConfig
from engine_core.errors import ProtocolViolation
from engine_core.step import WIRE_VERSION, GrammarPrepared, StepPlan, StepResult, StepTimes

MAX_FRAME_BYTES = 64 << 20
"""A plan's largest part is the ids of newly started rows."""


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    rank: int
    pid: int


class Configure(msgspec.Struct, tag="configure", array_like=True, frozen=True):
    config: WorkerConfig


class Loading(msgspec.Struct, tag="loading", array_like=True, frozen=True):
    """Progress of start-up, for people: what is being done, and how much of it."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The worker can take plans. Sizes as they are in force."""

    total_pages: int
    max_model_len: int
    dtype: str
    device: str
    """For people, e.g. "cpu (2 threads)"."""
    load_s: float
    decode_sms: int = 0
    prefill_sms: int = 0
    sm_alignment: int = 0
    decode_sms_choices: tuple[int, ...] = ()
    """Of the splits that the lanes' policy chooses from, ascending."""
    times: StepTimes | None = None
    """Where the lanes' policy follows the load."""
    no_grammars: str | None = None
    """Why rows can't follow grammars, if they can't."""


class Plan(msgspec.Struct, tag="plan", array_like=True, frozen=True):
    plan: StepPlan


class Result(msgspec.Struct, tag="result", array_like=True, frozen=True):
    result: StepResult


class Prepare(msgspec.Struct, tag="prepare", array_like=True, frozen=True):
    """Compile a grammar, beside the steps, then answer `Prepared`."""

    key: int
    kind: str
    text: str


class Prepared(msgspec.Struct, tag="prepared", array_like=True, frozen=True):
    outcome: GrammarPrepared


class CaughtUp(msgspec.Struct, tag="caught_up", array_like=True, frozen=True):
    """Rows that an earlier result named as late may be planned again."""

    slots: list[int]


class Forget(msgspec.Struct, tag="forget", array_like=True, frozen=True):
    """No row will start with this grammar any more."""

    key: int


class Quiesce(msgspec.Struct, tag="quiesce", array_like=True, frozen=True):
    """Synchronize every lane, then answer `Quiesced` with the same token."""

    token: int


class Quiesced(msgspec.Struct, tag="quiesced", array_like=True, frozen=True):
    token: int


class Farewell(msgspec.Struct, tag="farewell", array_like=True, frozen=True):
    """The worker's last frame before it aborts or refuses to start: the whole cause chain."""

    cause: str
    config_error: bool = False
    """The cause is a setting or a model folder: restarting can't help."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Synchronize every lane, free everything, exit with status 0."""


Body = (
    Hello
    | Configure
    | Loading
    | Ready
    | Plan
    | Result
    | Prepare
    | Prepared
    | CaughtUp
    | Forget
    | Quiesce
    | Quiesced
    | Farewell
    | Shutdown
)


class Frame(msgspec.Struct, array_like=True, frozen=True):
    version: int
    sequence: int
    """1, 2, 3 … in each direction."""
    body: Body


class FrameSocket(Protocol):
    """Bytes in, bytes out; what tests replace. Neither call blocks."""

    def send(self, data: bytes) -> None:
        """Queue one frame for the peer."""

    def receive(self) -> bytes | None:
        """The next frame, or None when none has arrived."""


class FrameChannel:
    """One end of a numbered frame stream over a `FrameSocket`."""

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._sent = 0
        self._received = 0

    def send(self, body: Body) -> None:
        """Number, encode and queue one frame. Raises ProtocolViolation for a frame beyond the size limit, or which the
        peer leaves no room for. Such a frame takes no number: what is sent after it, to say so, still fits."""
        data = self._encoder.encode(Frame(WIRE_VERSION, self._sent + 1, body))
        if len(data) > MAX_FRAME_BYTES:
            raise ProtocolViolation(f"a frame of {len(data)} bytes would exceed the limit of {MAX_FRAME_BYTES}")
        self._socket.send(data)
        self._sent += 1

    def receive(self) -> Body | None:
        """The next frame's body, or None. Raises ProtocolViolation for anything but the expected next frame."""
        data = self._socket.receive()
        if data is None:
            return None
        if len(data) > MAX_FRAME_BYTES:
            raise ProtocolViolation(f"a frame of {len(data)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
        try:
            frame = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolViolation(f"a malformed frame of {len(data)} bytes") from error
        if frame.version != WIRE_VERSION:
            raise ProtocolViolation(
                f"the peer speaks wire version {frame.version}, this side {WIRE_VERSION}: install one greenlane on both"
            )
        if frame.sequence != self._received + 1:
            kind = "duplicate" if frame.sequence <= self._received else "gap"
            raise ProtocolViolation(f"frame {frame.sequence} arrived after frame {self._received} ({kind})")
        self._received = frame.sequence
        return frame.body
