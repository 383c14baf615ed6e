"""The one way a worker dies on purpose (rule O15), in parts and as a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine_core.device.fail_stop import EXIT_ABORT, MAX_CAUSE_BYTES, FailStop

GUARD_S = 60.0


class Ended(BaseException):
    """Stands for the end of the process."""


def chained() -> BaseException:
    try:
        try:
            raise ValueError("the kernel faulted")
        except ValueError as first:
            raise RuntimeError("the lane is lost") from first
    except RuntimeError as error:
        return error


CAUSE = "step 3: RuntimeError: the lane is lost: ValueError: the kernel faulted"


def test_o15_the_cause_is_told_by_pipe_then_by_frame_then_kept_and_then_it_ends(tmp_path: Path) -> None:
    """O15: red when a part is missing, the pipe isn't first, or anything comes after the end."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    order: list[str] = []

    def farewell(cause: str) -> None:
        order.append(f"frame: {cause}, pipe: {os.read(read_fd, 1 << 16).decode()}")

    def end(status: int) -> None:
        order.append(f"end {status}")
        raise Ended

    stop = FailStop(farewell=farewell, control_fd=write_fd, crash_dir=str(tmp_path / "crash"), end=end)
    with pytest.raises(Ended):
        stop.abort("step 3", chained())
    os.close(read_fd)
    os.close(write_fd)
    assert order == [f"frame: {CAUSE}, pipe: {CAUSE}", f"end {EXIT_ABORT}"]
    (report,) = (tmp_path / "crash").iterdir()
    assert json.loads(report.read_text())["cause"] == CAUSE


def test_o15_nothing_that_fails_on_the_way_stops_the_abort(tmp_path: Path) -> None:
    """O15: red when a broken socket, pipe or disk keeps an aborting worker alive."""
    ended: list[int] = []
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")

    def farewell(cause: str) -> None:
        raise OSError("the socket is gone")

    FailStop(farewell=farewell, control_fd=10_000, crash_dir=str(blocked), end=ended.append).abort("why")
    assert ended == [EXIT_ABORT]


def test_o15_a_cause_of_any_length_fits_the_pipe() -> None:
    """O15: red when an abort blocks on a pipe that nobody reads."""
    read_fd, write_fd = os.pipe()
    said: list[str] = []
    ended: list[int] = []
    FailStop(farewell=said.append, control_fd=write_fd, crash_dir=None, end=ended.append).abort("x" * (1 << 20))
    assert len(os.read(read_fd, 1 << 20)) == MAX_CAUSE_BYTES
    os.close(read_fd)
    os.close(write_fd)
    assert ended == [EXIT_ABORT]


def test_o15_the_first_abort_is_the_one_that_is_told() -> None:
    """O15: red when two threads' aborts mix, or the second one ends the process under the first."""
    told: list[str] = []
    inside, go = threading.Event(), threading.Event()

    def farewell(cause: str) -> None:
        told.append(cause)
        if cause == "first":
            inside.set()
            assert go.wait(GUARD_S)

    stop = FailStop(farewell=farewell, control_fd=None, crash_dir=None, end=lambda status: told.append("end"))
    first = threading.Thread(target=stop.abort, args=("first",))
    first.start()
    assert inside.wait(GUARD_S)
    second = threading.Thread(target=stop.abort, args=("second",))
    second.start()
    assert told == ["first"]
    go.set()
    first.join(GUARD_S)
    second.join(GUARD_S)
    assert told == ["first", "end", "second", "end"]


PROGRAM = """
import atexit, os, sys, threading, time
from engine_core.device.fail_stop import FailStop

class Memory:
    def __del__(self):
        os.write(1, b"destructor ")

held = Memory()
atexit.register(os.write, 1, b"atexit ")
print("buffered", end="")
stop = FailStop(farewell=lambda cause: None, control_fd=int(sys.argv[1]), crash_dir=sys.argv[2])
if sys.argv[3] == "thread":
    threading.Thread(target=stop.abort, args=("the watchdog says so",)).start()
    time.sleep(600)
try:
    stop.abort("the main thread says so", ValueError("because"))
finally:
    os.write(1, b"finally ")
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("who", "cause"),
    [("main", "the main thread says so: ValueError: because"), ("thread", "the watchdog says so")],
)
def test_o15_a_real_process_ends_at_once_and_says_why(tmp_path: Path, who: str, cause: str) -> None:
    """O15: red when a destructor, an atexit handler, a finally block or a buffer's flush runs after the decision."""
    read_fd, write_fd = os.pipe()
    crash = tmp_path / "crash"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(write_fd), str(crash), who],
        pass_fds=(write_fd,),
        capture_output=True,
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        timeout=GUARD_S,
        check=False,
    )
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        assert pipe.read().decode() == cause
    assert (done.returncode, done.stdout) == (EXIT_ABORT, b"")
    assert b"worker aborts" in done.stderr
    (report,) = crash.iterdir()
    assert json.loads(report.read_text())["cause"] == cause
