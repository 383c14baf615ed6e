"""The gRPC channel to an engine core: its options, how it is opened, and how a message of a session is sent on it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from greenlane.engine.v1 import engine_pb2 as pb

MAX_MESSAGE_BYTES = 1 << 20
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # A window smaller than a step: the core's next message leaves when this side reads for it, and what happens
    # meanwhile merges. With room for five steps of 256 rows, a saturated front worked through five old ones, with a
    # visit of every stream for each; the newest was 30 ms old by then.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 10),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit the old one's connect backoff
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A plain channel to `unix:/path` or `host:port`, straight there whatever proxy the environment names."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


async def write(call: Any, message: pb.SessionRequest) -> None:
    """Send a message; of a call that has ended, reading tells why.

    Not by `call.write`: its failure overwrites the status that is still to be read with INTERNAL, "Internal error from
    Core", and reading ends at once: why a core ended a session while something was on its way to it, nobody would hear.
    """
    try:
        await call.wait_for_connection()
        await call._cython_call.send_serialized_message(message.SerializeToString())
    except grpc.aio.InternalError:
        await asyncio.Event().wait()
