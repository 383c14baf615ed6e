"""The ZMQ executor against real processes that speak its protocol: start, steps, and every way to lose a worker."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from engine_core.errors import ConfigError, EngineDead, describe_chain
from engine_core.executor.channel import Loading
from engine_core.executor.zmq import KILL_GRACE_S, StartInterrupted, ZmqExecutor
from engine_core.step import WIRE_VERSION, StepPlan, StepResult
from tests.unit.scripted_worker import READY
from tests.worker_config import worker_config

pytestmark = pytest.mark.e2e
SCRIPT = Path(__file__).with_name("scripted_worker.py")
GUARD_S = 60.0
"""Only a hang takes this long."""

CONFIG = worker_config(model="/nowhere", kv_cache_memory=None, gpu_wait_timeout=GUARD_S)


class Rig:
    """Executors in a private folder; everything that a test leaves behind is ended and checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.executors: list[ZmqExecutor] = []
        self.pids: list[int] = []

    def executor(
        self,
        scenario: str,
        *,
        gpu_wait_timeout: float = GUARD_S,
        worker_timeout: float = GUARD_S,
        start_timeout: float = GUARD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> ZmqExecutor:
        def command(address: str, control_fd: int) -> Sequence[str]:
            return [sys.executable, "-P", str(SCRIPT), scenario, address, str(control_fd)]

        executor = ZmqExecutor(
            self.folder / "worker.sock",
            command=command,
            wake_fd=self.wake_fd,
            gpu_wait_timeout=gpu_wait_timeout,
            worker_timeout=worker_timeout,
            start_timeout=start_timeout,
            clock=clock,
        )
        self.executors.append(executor)
        return executor

    def started(self, scenario: str, **settings: Any) -> ZmqExecutor:
        executor = self.executor(scenario, **settings)
        assert executor.start(CONFIG, lambda loading: None) == READY
        return executor

    def close(self) -> None:
        for executor in self.executors:
            executor.kill()
        os.close(self.wake_fd)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    tmp_path.chmod(0o700)
    before = set(psutil.Process().children())
    descriptors = len(os.listdir("/proc/self/fd"))
    rig = Rig(tmp_path)
    yield rig
    rig.close()
    assert set(psutil.Process().children()) == before, "a worker was left behind"
    assert len(os.listdir("/proc/self/fd")) <= descriptors, "descriptors were left open"


def plan(step: int, slots: int = 1) -> StepPlan:
    decode = b"".join(slot.to_bytes(4, "little") for slot in range(slots))
    return StepPlan(step, [], b"", b"", decode, [])


def until(condition: Callable[[], bool]) -> None:
    guard = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < guard


def collect(executor: ZmqExecutor, count: int = 1) -> list[StepResult]:
    results: list[StepResult] = []
    guard = time.monotonic() + GUARD_S
    while len(results) < count:
        assert time.monotonic() < guard
        executor.wait(1.0)
        results += executor.collect()
    return results


def death(executor: ZmqExecutor) -> str:
    """The cause with which the executor declares the engine dead."""
    with pytest.raises(EngineDead) as caught:
        collect(executor)
    return describe_chain(caught.value)


def workers() -> list[psutil.Process]:
    """Scripted workers of this process, which other tests' servers are children of, too."""
    return [child for child in psutil.Process().children() if any("scripted_worker" in word for word in _words(child))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []  # it has just ended


def worker_of(executor: ZmqExecutor) -> psutil.Process:
    (child,) = workers()
    return child


# ------------------------------ the good way


def test_plans_are_answered_in_order_and_the_worker_leaves_when_asked(rig: Rig) -> None:
    """Red when plans or results are lost or reordered, or a clean shutdown kills the worker."""
    executor = rig.executor("good")
    seen: list[Loading] = []
    executor.start(CONFIG, seen.append)
    assert seen == [Loading("loading weights", 1, 2)]
    for step in (1, 2, 3):
        executor.submit(plan(step, slots=2))
    results = collect(executor, 3)
    assert [result.step for result in results] == [1, 2, 3]
    assert [result.tokens for result in results] == [step.to_bytes(4, "little") * 2 for step in (1, 2, 3)]
    assert executor.collect() == []
    assert executor.next_deadline() is None
    worker = worker_of(executor)
    executor.close()
    assert not worker.is_running()
    assert not (rig.folder / "worker.sock").exists()


def test_quiesce_is_answered(rig: Rig) -> None:
    """Red when `quiesced` is true before the worker has answered, or never."""
    executor = rig.started("good")
    executor.quiesce()
    assert executor.next_deadline() is not None

    def answered() -> bool:
        executor.wait(1.0)
        executor.collect()
        return executor.quiesced

    until(answered)
    assert executor.next_deadline() is None


def test_wait_ends_when_the_inbox_wakes_it(rig: Rig) -> None:
    """Red when the inbox's descriptor isn't in the poller: requests would wait for the next result."""
    executor = rig.started("good")
    os.eventfd_write(rig.wake_fd, 1)
    executor.wait(None)


# ------------------------------ start


def test_a_setting_that_the_worker_refuses_is_a_config_error(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Red when a missing shard looks like a crash, which a supervisor would restart again and again, or the log says
    of a worker that said no and left that it was killed."""
    caplog.set_level("INFO")
    executor = rig.executor("config-error")
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing"):
        executor.start(CONFIG, lambda loading: None)
    executor.kill()
    (ended,) = [record for record in caplog.records if record.message == "worker_ended"]
    assert vars(ended)["fields"]["how"] == "exited with status 2"


def test_a_refusal_that_is_read_after_the_worker_s_end_is_one(rig: Rig) -> None:
    """Red when the end of the process counts before its last frame: a supervisor would restart it again and again."""
    executor = rig.executor("told-late")
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing"):
        executor.start(CONFIG, lambda loading: None)


def test_late_rows_that_caught_up_are_handed_on(rig: Rig) -> None:
    """Red when the engine never hears that a late row may be planned again, or hears it twice."""
    executor = rig.started("late")
    executor.submit(plan(1))
    results: list[StepResult] = []
    caught_up: list[int] = []
    while len(caught_up) < 3:
        executor.wait(GUARD_S)
        results += executor.collect()
        caught_up += executor.caught_up()
    assert [result.step for result in results] == [1]
    assert caught_up == [0, 2, 3]
    assert executor.caught_up() == []


@pytest.mark.parametrize(
    ("scenario", "cause"),
    [
        ("load-error", "worker 0 aborted: RuntimeError: out of memory"),
        ("exit-3", "exited with status 3"),
        ("wrong-rank", "a worker of rank 1"),
    ],
)
def test_a_worker_that_dies_or_misbehaves_while_starting(rig: Rig, scenario: str, cause: str) -> None:
    """Red when the pidfd isn't watched (start-up would wait for its time-out), or the cause is lost."""
    with pytest.raises(EngineDead) as caught:
        rig.executor(scenario).start(CONFIG, lambda loading: None)
    assert cause in describe_chain(caught.value)


@pytest.mark.parametrize("scenario", ["silent", "slow-start"])
def test_start_up_is_bounded(rig: Rig, scenario: str) -> None:
    """Red when a worker that hangs before or while loading is waited for without bound, or isn't killed."""
    executor = rig.executor(scenario, start_timeout=0.5)
    with pytest.raises(EngineDead, match=r"wasn't ready within 0\.5 s \(--start-timeout\)"):
        executor.start(CONFIG, lambda loading: None)
    assert not any(child.status() == psutil.STATUS_RUNNING for child in workers())


def test_start_up_can_be_called_off(rig: Rig) -> None:
    """Red when Ctrl-C while a model loads must wait for the load to end."""
    os.eventfd_write(rig.wake_fd, 1)
    with pytest.raises(StartInterrupted):
        rig.executor("slow-start").start(CONFIG, lambda loading: None)


# ------------------------------ losing the worker


def test_a_killed_worker_is_noticed_at_once(rig: Rig) -> None:
    """Red when only a heartbeat or a step's bound would tell, seconds later, or the exit isn't in the cause."""
    executor = rig.started("good")
    worker = worker_of(executor)
    worker.kill()
    started = time.monotonic()
    assert death(executor) == f"worker 0 (pid {worker.pid}) was killed by SIGKILL"
    assert time.monotonic() - started < GUARD_S / 2, "noticed by its descriptor, not by a time-out"


def test_a_frozen_worker_is_noticed_and_killed_even_when_idle(rig: Rig) -> None:
    """Red when heartbeats are off, or a stopped process is left behind holding the GPU."""
    executor = rig.started("good", worker_timeout=1.0)
    worker = worker_of(executor)
    worker.suspend()
    assert "stopped answering heartbeats for 1 s, and was killed" in death(executor)
    assert not worker.is_running()


def test_a_step_that_is_never_answered_ends_the_worker(rig: Rig) -> None:
    """Red when waiting for a result has no bound (case 10), or the farewell of the pipe is lost on this path."""
    executor = rig.started("never-answer-with-pipe", gpu_wait_timeout=0.5)
    executor.submit(plan(1))
    executor.submit(plan(2))
    worker = worker_of(executor)
    cause = death(executor)
    assert (
        cause == f"worker 0 didn't answer step 1 within {0.5 + KILL_GRACE_S:g} s and was killed: the last kernel hangs"
    )
    assert not worker.is_running()


def test_each_answer_starts_the_next_steps_bound(rig: Rig) -> None:
    """Red when the bound counts from the submission: a queue of legal steps would be killed."""
    now = [0.0]
    executor = rig.executor("good", gpu_wait_timeout=10.0, clock=lambda: now[0])
    executor.start(CONFIG, lambda loading: None)
    assert executor.next_deadline() is None
    executor.submit(plan(1))
    now[0] = 9.0
    executor.submit(plan(2))
    assert executor.next_deadline() == 10.0 + KILL_GRACE_S
    first = collect(executor)
    assert executor.next_deadline() == (19.0 + KILL_GRACE_S if len(first) == 1 else None)


@pytest.mark.parametrize(
    ("scenario", "cause"),
    [
        ("farewell-by-frame", "worker 0 aborted: step 1 raised: ValueError: bad"),
        ("farewell-by-pipe", "was killed by SIGKILL: CUDA error: an illegal memory access was encountered"),
        ("gap", "worker 0 broke the protocol: frame 5 arrived after frame 3 (gap)"),
        ("duplicate", "worker 0 broke the protocol: frame 3 arrived after frame 3 (duplicate)"),
        ("version", f"worker 0 broke the protocol: the peer speaks wire version {WIRE_VERSION + 1}"),
        ("garbage", "worker 0 broke the protocol: a malformed frame of 3 bytes"),
        ("twice", "worker 0 broke the protocol: a result for step 1 arrived although no plan is outstanding"),
        ("hello-again", "worker 0 broke the protocol: Hello arrived while serving"),
    ],
)
def test_farewells_and_violations_name_their_cause(rig: Rig, scenario: str, cause: str) -> None:
    """Red when a farewell (by frame or by pipe) or a broken frame is ignored, or its cause doesn't reach clients."""
    executor = rig.started(scenario)
    executor.submit(plan(1))
    with pytest.raises(EngineDead) as caught:
        collect(executor, 2)
    assert cause in describe_chain(caught.value)


def test_a_wrong_quiesce_token_is_a_violation(rig: Rig) -> None:
    """Red when an answer to a question that wasn't asked counts as proof."""
    executor = rig.started("wrong-token")
    executor.quiesce()
    assert "Quiesced names 6" in death(executor)


def test_submitting_to_a_dead_worker_says_why_it_died(rig: Rig) -> None:
    """Red when the send error hides the farewell or the exit behind it."""
    executor = rig.started("good")
    worker = worker_of(executor)
    worker.kill()
    until(lambda: worker.status() == psutil.STATUS_ZOMBIE)

    def flood() -> None:
        for step in range(1, 1000):
            executor.submit(plan(step))
        collect(executor)

    with pytest.raises(EngineDead, match="was killed by SIGKILL"):
        flood()


# ------------------------------ a worker started by hand


def test_a_second_connection_is_turned_away(rig: Rig) -> None:
    """Red when a stray process that connects to the socket disturbs, or replaces, the worker that serves."""
    executor = rig.started("good")
    with zmq.Context() as context, context.socket(zmq.PAIR) as stray:
        monitor = stray.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        stray.connect(f"ipc://{rig.folder / 'worker.sock'}")
        assert monitor.poll(int(GUARD_S) * 1000)
        stray.send(b"not a frame")
        executor.submit(plan(1))
        assert [result.step for result in collect(executor)] == [1]
        stray.disable_monitor()
        monitor.close()
        stray.close(0)
    executor.submit(plan(2))
    assert [result.step for result in collect(executor)] == [2]


def test_a_worker_by_hand_serves_and_sees_the_core_leave(rig: Rig) -> None:
    """Red when --worker-address doesn't work, or a worker that wasn't spawned outlives its core unnoticed."""
    executor = ZmqExecutor(
        rig.folder / "worker.sock",
        command=None,
        wake_fd=rig.wake_fd,
        gpu_wait_timeout=GUARD_S,
        worker_timeout=GUARD_S,
        start_timeout=GUARD_S,
    )
    rig.executors.append(executor)
    worker = psutil.Popen(
        [sys.executable, "-P", str(SCRIPT), "good", f"ipc://{rig.folder / 'worker.sock'}", "0"],
    )
    assert executor.start(CONFIG, lambda loading: None) == READY
    executor.submit(plan(1))
    assert [result.step for result in collect(executor)] == [1]
    executor.kill()
    assert worker.wait(GUARD_S) == 9


def test_signals_to_the_terminal_reach_the_core_alone(rig: Rig) -> None:
    """Red when the worker shares the core's process group: Ctrl-C would kill it in the middle of a drain."""
    worker = worker_of(rig.started("good"))
    assert os.getpgid(worker.pid) == worker.pid
