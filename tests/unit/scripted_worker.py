"""A worker process that speaks the frame protocol and then does what its scenario says; started by executor tests.

`python -P scripted_worker.py SCENARIO ipc:///path CONTROL_FD`
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import msgspec

from engine_core.executor.channel import (
    CaughtUp,
    Configure,
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
from engine_core.executor.zmq import PeerLost, ZmqFrames, connect_worker
from engine_core.step import WIRE_VERSION, StepPlan, StepResult

READY = Ready(total_pages=64, max_model_len=128, dtype="float32", device="scripted", load_s=0.0)


def answer(plan: StepPlan) -> StepResult:
    """One token for each decode row: the step's number."""
    tokens = plan.step.to_bytes(4, "little") * (len(plan.decode_slots) // 4)
    return StepResult(plan.step, tokens, None, [], plan.step, plan.step)


class Script:
    def __init__(self, scenario: str, address: str, control_fd: int) -> None:
        self.scenario = scenario
        self.control_fd = control_fd
        self.frames: ZmqFrames = connect_worker(address)
        self.channel = FrameChannel(self.frames)

    def run(self) -> int:
        if self.scenario == "silent":
            signal.pause()
        if self.scenario == "exit-3":
            return 3
        self.channel.send(Hello(rank=1 if self.scenario == "wrong-rank" else 0, pid=os.getpid()))
        self.start()
        while True:
            self.frames.wait(None)
            while (body := self.channel.receive()) is not None:
                if isinstance(body, Shutdown):
                    return 0
                self.handle(body)

    def start(self) -> None:
        while not isinstance(self.channel.receive(), Configure):
            self.frames.wait(None)
        if self.scenario == "config-error":
            self.channel.send(Farewell("model.safetensors is missing", config_error=True))
            raise SystemExit(2)
        if self.scenario == "load-error":
            self.channel.send(Farewell("RuntimeError: out of memory"))
            raise SystemExit(1)
        self.channel.send(Loading("loading weights", 1, 2))
        if self.scenario == "slow-start":
            signal.pause()
        self.channel.send(READY)

    def handle(self, body: object) -> None:
        if isinstance(body, Plan):
            self.step(body.plan)
        elif isinstance(body, Quiesce):
            self.channel.send(Quiesced(body.token + 5 if self.scenario == "wrong-token" else body.token))

    def step(self, plan: StepPlan) -> None:
        result = answer(plan)
        match self.scenario:
            case "never-answer":
                return
            case "farewell-by-pipe":
                os.write(self.control_fd, b"CUDA error: an illegal memory access was encountered")
                os.kill(os.getpid(), signal.SIGKILL)
            case "farewell-by-frame":
                self.channel.send(Farewell("step 1 raised: ValueError: bad"))
                signal.pause()
            case "never-answer-with-pipe":
                if plan.step == 1:
                    os.write(self.control_fd, b"the last kernel hangs")
            case "twice":
                self.channel.send(Result(result))
                self.channel.send(Result(result))
            case "gap" | "duplicate" | "version" | "garbage":
                self.frames.send(self.bad_frame(Result(result)))
            case "late":
                self.channel.send(Result(result))
                self.channel.send(CaughtUp([0, 2]))
                self.channel.send(CaughtUp([3]))
            case "hello-again":
                self.channel.send(Hello(0, os.getpid()))
            case _:
                self.channel.send(Result(result))

    def bad_frame(self, body: Result) -> bytes:
        """After Hello, Loading and Ready the next frame is number 4."""
        if self.scenario == "garbage":
            return b"\x93\x01\x04"
        sequence = {"gap": 5, "duplicate": 3, "version": 4}[self.scenario]
        version = WIRE_VERSION + (self.scenario == "version")
        return msgspec.msgpack.encode(Frame(version, sequence, body))


def end_before_the_reason(address: str) -> int:
    """The process ends first; its connection, which a helper of it has, brings the reason afterwards."""
    command = [sys.executable, "-P", __file__, "reason", address, str(os.getpid())]
    helper = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert helper.stdout is not None
    helper.stdout.read()  # to its end: the helper is configured
    return 2


def tell_the_reason(address: str, worker: int) -> int:
    frames = connect_worker(address)
    channel = FrameChannel(frames)
    channel.send(Hello(rank=0, pid=worker))
    while not isinstance(channel.receive(), Configure):
        frames.wait(None)
    ended_fd = os.pidfd_open(worker)
    os.close(sys.stdout.fileno())
    select.select([ended_fd], [], [])
    time.sleep(0.3)  # the core has seen it, too
    channel.send(Farewell("model.safetensors is missing", config_error=True))
    frames.end()
    return 0


if __name__ == "__main__":
    try:
        if sys.argv[1] == "told-late":
            sys.exit(end_before_the_reason(sys.argv[2]))
        if sys.argv[1] == "reason":
            sys.exit(tell_the_reason(sys.argv[2], int(sys.argv[3])))
        sys.exit(Script(sys.argv[1], sys.argv[2], int(sys.argv[3])).run())
    except PeerLost:
        sys.exit(9)
