"""The bytes under a `FrameChannel`: a ZMQ PAIR socket over ipc, and the notice when its other end is gone.

Owns socket options and the wait. A socket belongs to one thread at a time. The core binds and sends ZMTP heartbeats,
which the peer's I/O thread answers: a frozen process (SIGSTOP) doesn't, and its connection closes, even when idle.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine_core.errors import ConfigError, ProtocolViolation
from engine_core.executor.channel import MAX_FRAME_BYTES

HEARTBEAT_MS = 1000
QUEUED_FRAMES = 64
"""Far above the plans that may be in flight; a peer that lets more pile up doesn't read."""
EXIT_GRACE_S = 5.0
"""How long a process or a socket may take to end in good order."""
OPENED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED


class PeerLost(Exception):
    """The other end of a worker's socket is gone or frozen."""


class ZmqFrames:
    """A `FrameSocket` over a ZMQ PAIR socket, with a wait that also notices the peer's loss."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, heartbeat_timeout_s: float | None) -> None:
        socket = context.socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, QUEUED_FRAMES)
        socket.setsockopt(zmq.RCVHWM, QUEUED_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if heartbeat_timeout_s is not None:
            socket.setsockopt(zmq.HEARTBEAT_IVL, min(HEARTBEAT_MS, int(heartbeat_timeout_s * 500)))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(heartbeat_timeout_s * 1000))
        self._context = context
        self._socket = socket
        self._monitor = socket.get_monitor_socket(OPENED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._opened: list[int] = []
        """Descriptors of the connections, until one of them is the peer."""
        self._peer_fd: int | None = None
        self._lost = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def bind(self, path: Path) -> None:
        """Listen on an ipc path; raises ConfigError when it can't be had."""
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise ConfigError(f"can't listen on {path}: {error}") from error

    def connect(self, address: str) -> None:
        """Raises ConfigError for what is no address, and is closed then."""
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close(0.0)
            raise ConfigError(
                f"--connect {address} can't be used ({error}); it must be ipc:///PATH, where the engine core has "
                "--worker-address unix:/PATH"
            ) from error

    def watch(self, fd: int) -> None:
        """Have `wait` return when this descriptor becomes readable too."""
        self._poller.register(fd, zmq.POLLIN)

    def send(self, data: bytes) -> None:
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.Again as error:
            raise ProtocolViolation(f"the peer doesn't read: {QUEUED_FRAMES} frames are queued") from error

    def receive(self) -> bytes | None:
        try:
            return self._socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def wait(self, timeout: float | None) -> bool:
        """Block until a frame, a watched descriptor or a disconnect is there, at most `timeout` seconds.

        Returns whether there may be something to do. Raises PeerLost when the connection was closed or its heartbeat
        stopped, once every frame that came before has been received.
        """
        ready = self._poller.poll(None if timeout is None else math.ceil(max(0.0, timeout) * 1000))
        if any(source is self._monitor for source, _ in ready):
            self._read_monitor()
        if self._lost and not self._socket.poll(0):
            raise PeerLost("the connection was closed or stopped answering heartbeats")
        return bool(ready)

    def read_to_the_end(self, timeout: float) -> None:
        """For a peer whose process has ended: block until all that it sent can be received, `timeout` seconds at most.

        The end of its connection comes behind its last byte, and the I/O thread gets there in its own time.
        """
        deadline = time.monotonic() + timeout
        self._read_monitor()
        while self._peer_fd is not None and not self._lost and (left := deadline - time.monotonic()) > 0:
            self._monitor.poll(math.ceil(left * 1000))
            self._read_monitor()

    def _read_monitor(self) -> None:
        """The first connection that speaks ZMTP is the peer: another process may ask whether anybody listens here.

        Whoever comes later is turned away by the PAIR socket and harms nobody.
        """
        while self._monitor.poll(0):
            happened = recv_monitor_message(self._monitor)
            what, fd = happened["event"], happened["value"]
            if fd == self._peer_fd and what == zmq.EVENT_DISCONNECTED:
                self._lost = True
            elif self._peer_fd is not None:
                continue
            elif what == zmq.EVENT_DISCONNECTED:
                self._opened.remove(fd)
            elif what == zmq.EVENT_HANDSHAKE_SUCCEEDED:  # doesn't say whose, and follows its opening at once
                self._peer_fd = self._opened[-1]
            else:
                self._opened.append(fd)

    def close(self, linger_s: float = EXIT_GRACE_S) -> None:
        """Close the socket; frames already sent may go out for `linger_s` seconds more, while the context lives."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(linger_s * 1000))

    def end(self, linger_s: float = EXIT_GRACE_S) -> None:
        """Close the socket, and return when frames already sent are with the kernel, after `linger_s` seconds at most.

        Without it the last frame of a process that ends is lost where the I/O thread is slower. Ends the context too.
        """
        self.close(linger_s)
        self._context.term()


def connect_worker(address: str) -> ZmqFrames:
    """The worker's end (`address` is the `ipc://` address of --connect). `wait` raises PeerLost when the core is gone.

    Without heartbeats of its own: a core that is merely stopped for a while must find its worker as it was.
    """
    frames = ZmqFrames(zmq.Context.instance(), heartbeat_timeout_s=None)
    frames.connect(address)
    return frames
