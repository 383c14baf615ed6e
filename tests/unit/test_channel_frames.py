"""Frames by values: numbering, and what each broken one means."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest

from engine_core.errors import ProtocolViolation
from engine_core.executor import channel
from engine_core.executor.channel import (
    Body,
    Farewell,
    Frame,
    FrameChannel,
    Hello,
    Loading,
    Plan,
    Quiesce,
    Quiesced,
    Ready,
    Result,
    Shutdown,
)
from engine_core.step import WIRE_VERSION, PrefillChunk, RowSampling, RowStart, StepPlan, StepResult

BODIES: list[Body] = [
    Hello(0, 4711),
    Loading("load weights", 3, 10),
    Ready(64, 128, "float32", "cpu (2 threads)", 1.5),
    Plan(
        StepPlan(
            1,
            [RowStart(3, 2, b"\1\0\0\0\2\0\0\0", 0, b"\5\0\0\0", RowSampling(seed=2**64 - 1, logit_bias={7: -1.0}))],
            b"",
            b"",
            b"\2\0\0\0",
            [PrefillChunk(3, 0, 2, True)],
        )
    ),
    Result(StepResult(1, b"\1\0\0\0", None, [], 1, 0, error="RuntimeError: out of memory", busy_us=650)),
    Quiesce(1),
    Quiesced(1),
    Farewell("cause", config_error=True),
    Shutdown(),
]


class Wire:
    """A socket whose two directions are one queue."""

    def __init__(self) -> None:
        self.queue: deque[bytes] = deque()

    def send(self, data: bytes) -> None:
        self.queue.append(data)

    def receive(self) -> bytes | None:
        return self.queue.popleft() if self.queue else None


def received(*frames: bytes) -> list[Body]:
    """What a channel makes of these frames."""
    wire = Wire()
    wire.queue.extend(frames)
    end = FrameChannel(wire)
    bodies: list[Body] = []
    while (body := end.receive()) is not None:
        bodies.append(body)
    return bodies


def frame(sequence: int, body: Body | None = None, version: int = WIRE_VERSION) -> bytes:
    return msgspec.msgpack.encode(Frame(version, sequence, body or Shutdown()))


def test_every_body_survives_the_wire() -> None:
    """Red when a field can't be encoded, changes on the way, or two bodies share a tag."""
    wire = Wire()
    sender = FrameChannel(wire)
    for body in BODIES:
        sender.send(body)
    assert received(*wire.queue) == BODIES


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([frame(2)], r"frame 2 arrived after frame 0 \(gap\)"),
        ([frame(1), frame(3)], r"frame 3 arrived after frame 1 \(gap\)"),
        ([frame(1), frame(1)], r"frame 1 arrived after frame 1 \(duplicate\)"),
        ([frame(0)], r"frame 0 arrived after frame 0 \(duplicate\)"),
        ([frame(1, version=WIRE_VERSION + 1)], f"wire version {WIRE_VERSION + 1}, this side {WIRE_VERSION}"),
        ([b""], "a malformed frame of 0 bytes"),
        ([frame(1)[:-1]], "a malformed frame"),
        ([frame(1) + b"\0"], "a malformed frame"),
        ([msgspec.msgpack.encode([WIRE_VERSION, 1, ["unknown", 1]])], "a malformed frame"),
        ([msgspec.msgpack.encode([WIRE_VERSION, 1, ["hello", "rank", 1]])], "a malformed frame"),
    ],
)
def test_a_broken_frame_is_a_violation(frames: list[bytes], text: str) -> None:
    """Red when a gap, a duplicate, another version or garbage is taken for a frame, or raises anything else."""
    with pytest.raises(ProtocolViolation, match=text):
        received(*frames)


def test_frames_have_a_size_limit_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a frame of any size is decoded, or sent for the peer to choke on."""
    monkeypatch.setattr(channel, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ProtocolViolation, match="exceeds the limit of 100"):
        received(frame(1, Farewell("x" * 200)))
    with pytest.raises(ProtocolViolation, match="would exceed the limit of 100"):
        FrameChannel(Wire()).send(Farewell("x" * 200))


class FullWire(Wire):
    """Has no room for one frame."""

    full = False

    def send(self, data: bytes) -> None:
        if self.full:
            self.full = False
            raise ProtocolViolation("the peer doesn't read")
        super().send(data)


def test_a_frame_that_had_no_room_takes_no_number() -> None:
    """Red when the farewell that tells why is itself taken for a gap, and the cause is lost."""
    wire = FullWire()
    sender, receiver = FrameChannel(wire), FrameChannel(wire)
    sender.send(Hello(0, 1))
    wire.full = True
    with pytest.raises(ProtocolViolation, match="doesn't read"):
        sender.send(Loading("load weights", 1, 2))
    sender.send(Farewell("the peer doesn't read"))
    assert [receiver.receive(), receiver.receive()] == [Hello(0, 1), Farewell("the peer doesn't read")]
