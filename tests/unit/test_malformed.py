"""Bytes that are no message, sent to every method of every gRPC server: the client's fault, and nothing is logged.

The servers have a process of their own, since the log of a process tells of all its event loops, closed ones too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from greenlane.engine.v1 import engine_pb2
from greenlane.text.v1 import text_pb2
from grpc_health.v1 import health_pb2
from smg_grpc_proto import vllm_engine_pb2

from tests.unit.served_engine import GUARD_S, OPTIONS

NO_MESSAGE = b"\xff\xff\xff"
ROOT = Path(__file__).parents[2]


class EveryServer:
    """The process, and a channel to each of its servers."""

    def __init__(self, folder: Path) -> None:
        folders = f"{ROOT}{os.pathsep}{ROOT / 'proto'}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.unit.every_server", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": folders, "GRPC_VERBOSITY": "error"},  # its own chatter is no log of ours
            text=True,
        )
        self._channels = ExitStack()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log()
        addresses = json.loads(line)
        text, vllm, engine = (
            self._channels.enter_context(grpc.insecure_channel(addresses[name], OPTIONS))
            for name in ("text", "vllm", "engine")
        )
        health = health_pb2.DESCRIPTOR.services_by_name["Health"]
        self.services: list[tuple[ServiceDescriptor, grpc.Channel]] = [
            (text_pb2.DESCRIPTOR.services_by_name["Text"], text),
            (vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"], vllm),
            (engine_pb2.DESCRIPTOR.services_by_name["Engine"], engine),
            *((health, channel) for channel in (text, vllm, engine)),
        ]
        """Every service of ours, and where it is."""

    def log(self) -> str:
        """All that the process said of itself, its end included."""
        self._channels.close()
        _, log = self._process.communicate(timeout=GUARD_S)
        return log

    def close(self) -> None:
        self._channels.close()
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def servers() -> Iterator[EveryServer]:
    with tempfile.TemporaryDirectory(prefix="greenlane-test-") as folder:
        servers = EveryServer(Path(folder))
        yield servers
        servers.close()


def end_of(channel: grpc.Channel, method: str, *, streams: bool, data: bytes) -> grpc.StatusCode:
    """How a call with these bytes ends."""
    open_call: Any = channel.unary_stream if streams else channel.unary_unary
    try:
        answer = open_call(method)(data, timeout=GUARD_S)
        if streams:
            next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def test_malformed_messages(servers: EveryServer) -> None:
    """Red if garbage ends a call as a fault of the server (UNKNOWN), or writes a traceback into the log."""
    ends: dict[tuple[str, grpc.Channel], grpc.StatusCode] = {}
    for service, channel in servers.services:
        for method in service.methods:
            if method.client_streaming:
                continue
            path = f"/{service.full_name}/{method.name}"
            ends[path, channel] = end_of(channel, path, streams=method.server_streaming, data=NO_MESSAGE)
    assert set(ends.values()) == {grpc.StatusCode.INVALID_ARGUMENT}, ends
    assert len({path for path, _ in ends}) > 20
    assert servers.log() == ""


def test_others_are_read(servers: EveryServer) -> None:
    """Red if a call is refused because one before it was malformed."""
    for service, channel in servers.services:
        if service.name == "Health":
            path = f"/{service.full_name}/Check"
            for data, end in ((NO_MESSAGE, grpc.StatusCode.INVALID_ARGUMENT), (b"", grpc.StatusCode.OK)):
                assert end_of(channel, path, streams=False, data=data) is end
