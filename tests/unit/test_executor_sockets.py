"""Socket paths: what is cleared away, what is refused, and where private folders are."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from engine_core.errors import ConfigError
from engine_core.executor.frames import PeerLost, ZmqFrames, connect_worker
from engine_core.executor.sockets import check_private, claim
from engine_core.executor.zmq import ZmqExecutor

GUARD_S = 60.0
"""Only a hang takes this long."""


@contextmanager
def listener(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(1)
        yield


def test_a_dead_process_leaves_no_obstacle(tmp_path: Path) -> None:
    """Red when a leftover socket makes every later bind fail (case 11)."""
    path = tmp_path / "s"
    with listener(path):
        pass
    assert path.exists()
    claim(path)
    assert not path.exists()
    claim(path)


def test_a_live_listener_is_left_alone(tmp_path: Path) -> None:
    """Red when a second process unlinks the socket of one that serves: clients would reach the wrong one."""
    path = tmp_path / "s"
    with listener(path), pytest.raises(ConfigError, match="another process listens"):
        claim(path)
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_never_removed(tmp_path: Path, kind: str) -> None:
    """Red when a wrong path costs somebody's file (libzmq and gRPC would unlink it)."""
    path, target = tmp_path / "s", tmp_path / "target"
    target.write_text("precious")
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    with pytest.raises(ConfigError, match="is no socket"):
        claim(path)
    assert path.exists()
    assert target.read_text() == "precious"


def test_paths_that_no_socket_can_have_are_named(tmp_path: Path) -> None:
    """Red when a long path or a missing folder ends in an unreadable error of the transport."""
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        claim(tmp_path / ("x" * 120))
    with pytest.raises(ConfigError, match="doesn't exist"):
        claim(tmp_path / "missing" / "s")


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o707])
def test_an_open_folder_is_refused_for_worker_sockets(tmp_path: Path, mode: int) -> None:
    """Red when --worker-address may lie where another user could pose as the worker."""
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="mkdir -m 700"):
        check_private(tmp_path)
    wake_fd = os.eventfd(0)
    with pytest.raises(ConfigError, match="mkdir -m 700"):
        ZmqExecutor(
            tmp_path / "s", command=None, wake_fd=wake_fd, gpu_wait_timeout=1, worker_timeout=1, start_timeout=1
        )
    os.close(wake_fd)


def test_a_link_or_a_missing_folder_is_not_private(tmp_path: Path) -> None:
    """Red when a link is followed to a folder that passes the check and is changed later."""
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    check_private(folder)
    with pytest.raises(ConfigError, match="mode 0700"):
        check_private(link)
    with pytest.raises(ConfigError, match="can't be used"):
        check_private(tmp_path / "missing")


def test_a_worker_ends_behind_its_last_frame(tmp_path: Path) -> None:
    """Red when a process may end while its last frame, the reason for the end, still waits for the I/O thread."""
    path = tmp_path / "worker.sock"
    worker = connect_worker(f"ipc://{path}")
    worker.send(b"the reason")
    ending = threading.Thread(target=worker.end, args=(GUARD_S,))
    ending.start()
    ending.join(0.2)
    assert ending.is_alive(), "nobody has the frame yet"
    core = ZmqFrames(zmq.Context(), heartbeat_timeout_s=None)
    core.bind(path)
    while (frame := core.receive()) is None:
        core.wait(GUARD_S)
    assert frame == b"the reason"
    ending.join(GUARD_S)
    assert not ending.is_alive()
    core.end(0.0)


def test_who_only_asks_whether_somebody_listens_is_no_worker(tmp_path: Path) -> None:
    """Red when a second engine core, refused at a socket where a worker is waited for, ends the first by asking."""
    path = tmp_path / "worker.sock"
    core = ZmqFrames(zmq.Context(), heartbeat_timeout_s=None)
    core.bind(path)
    with pytest.raises(ConfigError, match="another process listens"):
        claim(path)
    worker = connect_worker(f"ipc://{path}")
    worker.send(b"hello")
    assert next_frame(core) == b"hello"
    worker.close(0.0)
    wait_for_loss(core)
    core.end(0.0)


def test_a_worker_s_loss_is_noticed_whoever_came_before_it(tmp_path: Path) -> None:
    """Red when a connection that says nothing counts as the worker's: then the worker's end isn't noticed, only its."""
    path = tmp_path / "worker.sock"
    core = ZmqFrames(zmq.Context(), heartbeat_timeout_s=None)
    core.bind(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(path))
        assert silent.recv(64), "the greeting: it is taken"
        worker = connect_worker(f"ipc://{path}")
        worker.send(b"hello")
        assert next_frame(core) == b"hello"
        worker.close(0.0)
        wait_for_loss(core)
        with pytest.raises(BlockingIOError):  # neither more to read nor the end
            silent.recv(64, socket.MSG_DONTWAIT)
    core.end(0.0)


def next_frame(core: ZmqFrames) -> bytes:
    while (frame := core.receive()) is None:
        core.wait(GUARD_S)
    return frame


def wait_for_loss(core: ZmqFrames) -> None:
    with pytest.raises(PeerLost):  # noqa: PT012 - each wait may return for something else
        while core.wait(GUARD_S):
            pass


def test_a_worker_is_told_what_its_address_must_look_like() -> None:
    """Red when the engine core's spelling of the same socket is refused without the worker's."""
    with pytest.raises(ConfigError, match="it must be ipc:///PATH"):
        connect_worker("unix:/run/worker.sock")
