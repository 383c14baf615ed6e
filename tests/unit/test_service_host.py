"""The engine thread with a scripted engine: what crosses between the threads, in which order, and how it ends."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engine_core.cache.watch import CacheWatch
from engine_core.errors import ConfigError, EngineDead
from engine_core.host import MAX_BACKLOG, Call, EngineHost, Inbox, Publish
from engine_core.request import Abort, Command, Grammar, Output
from engine_core.step import GrammarPrepared, StepPlan, StepResult

GUARD_S = 30.0
ABORT = Abort(1, (1,))


class ScriptedEngine:
    """Notes each call with the thread's consent; `on_step` is what a step does."""

    def __init__(self, publish: Publish, journal: list[str]) -> None:
        self.publish = publish
        self.journal = journal
        self.commands: list[Command] = []
        self.open = 0
        self.steps = 0
        self.on_step: Callable[[], None] = lambda: None
        self.draining = threading.Event()
        self.thread = threading.get_ident()

    @property
    def open_count(self) -> int:
        return self.open

    def submit(self, command: Command, now: float) -> None:
        assert threading.get_ident() == self.thread
        self.commands.append(command)

    def step(self, now: float) -> None:
        self.steps += 1
        self.on_step()

    def next_wakeup(self, now: float) -> float | None:
        return None

    def drain(self) -> None:
        self.journal.append("drain")
        self.draining.set()

    def abort_all(self, cause: str) -> None:
        self.journal.append(f"abort_all: {cause}")
        self.open = 0
        self.publish([Output(1, 99)])

    def fail_all(self, cause: str) -> None:
        self.journal.append(f"fail_all: {cause}")
        self.publish([Output(1, 100)])

    def flush_cache(self) -> int:
        return 3

    def watch_cache(self) -> CacheWatch:
        raise NotImplementedError

    def unwatch_cache(self, watch: CacheWatch) -> None:
        raise NotImplementedError

    def stats(self) -> Any:
        assert threading.get_ident() == self.thread
        return {"steps": self.steps}


class ScriptedExecutor:
    """Waits on the inbox alone, as the real one does when no worker speaks."""

    def __init__(self, wake_fd: int, journal: list[str]) -> None:
        self.wake_fd = wake_fd
        self.journal = journal
        self.waits = 0
        self.held = threading.Event()
        self.held.set()

    def wait(self, timeout: float | None) -> None:
        self.waits += 1
        select.select([self.wake_fd], [], [], timeout)
        assert self.held.wait(GUARD_S)

    def close(self) -> None:
        self.journal.append("close")

    def kill(self) -> None:
        self.journal.append("kill")

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> list[StepResult]:
        return []

    def prepare(self, key: int, grammar: Grammar) -> None: ...

    def prepared(self) -> list[GrammarPrepared]:
        return []

    def caught_up(self) -> list[int]:
        return []

    def forget(self, key: int) -> None: ...

    def quiesce(self) -> None: ...

    @property
    def quiesced(self) -> bool:
        return True


class Rig:
    """A host and its listener; the journal holds what happened, in order, on both threads."""

    def __init__(self) -> None:
        self.journal: list[str] = []
        self.start_error: Exception | None = None
        self.host = EngineHost(self._start, self, asyncio.get_running_loop())
        self.outcome: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.delivered = asyncio.Event()
        self.ready = threading.Event()

    def _start(self, wake_fd: int, publish: Publish) -> tuple[ScriptedEngine, ScriptedExecutor]:
        if self.start_error is not None:
            raise self.start_error
        self.engine = ScriptedEngine(publish, self.journal)
        self.executor = ScriptedExecutor(wake_fd, self.journal)
        self.ready.set()
        return self.engine, self.executor

    async def begin(self) -> None:
        self.host.begin()
        assert await asyncio.to_thread(self.ready.wait, GUARD_S)
        while await self.host.stats() is None:
            pass

    async def ended_with(self) -> BaseException | None:
        return await asyncio.wait_for(self.outcome, GUARD_S)

    # -------------------------- Listener

    def deliver(self, outputs: list[Output]) -> None:
        self.journal.append(f"deliver: {[output.step for output in outputs]}")
        self.delivered.set()

    async def dying(self, cause: str) -> None:
        self.journal.append(f"dying: {cause}")

    def ended(self, error: BaseException | None) -> None:
        self.journal.append("ended")
        self.outcome.set_result(error)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.host.stop()
    await rig.host.join()


async def test_commands_reach_the_engine_in_order_and_outputs_come_back(rig: Rig) -> None:
    """Red when commands or outputs cross the threads out of order, or on the wrong one."""
    await rig.begin()
    rig.engine.on_step = lambda: rig.engine.publish([Output(1, 7)]) if rig.engine.commands else None
    rig.host.submit([ABORT, Abort(2, (2,))])
    await asyncio.wait_for(rig.delivered.wait(), GUARD_S)
    assert rig.engine.commands == [ABORT, Abort(2, (2,))]
    assert rig.journal[0] == "deliver: [7]"


async def test_an_idle_thread_sleeps(rig: Rig) -> None:
    """Red when a wake-up is left in the descriptor: an idle core would spin (case 9)."""
    await rig.begin()
    rig.host.submit([ABORT])
    await rig.host.stats()
    steps = rig.engine.steps
    for _ in range(20):
        await rig.host.stats()
    assert rig.engine.steps <= steps + 22, "one step for each call at most, and no more in between"


async def test_health_turns_before_any_failure_is_delivered(rig: Rig) -> None:
    """Red when what a failing step published, or fail_all's words, overtake the change of health."""
    await rig.begin()

    def fail() -> None:
        rig.engine.publish([Output(1, 5)])
        raise EngineDead("step 5 was lost") from ValueError("bad")

    rig.engine.on_step = fail
    rig.host.submit([ABORT])
    error = await rig.ended_with()
    assert isinstance(error, EngineDead)
    cause = "step 5 was lost: ValueError: bad"
    assert "kill" in rig.journal
    told = [entry for entry in rig.journal if entry != "kill"]
    assert told == [f"dying: {cause}", f"fail_all: {cause}", "deliver: [5, 100]", "ended"]


async def test_any_exception_of_a_step_is_a_fail_stop(rig: Rig) -> None:
    """Red when a bug in the engine ends the thread without a word to anybody."""
    await rig.begin()

    def bug() -> None:
        raise KeyError("slot")

    rig.engine.on_step = bug
    rig.host.submit([ABORT])
    assert isinstance(await rig.ended_with(), KeyError)
    assert rig.journal[0] == "dying: KeyError: 'slot'"


@pytest.mark.parametrize("error", [ConfigError("--model is missing"), EngineDead("worker 0 exited with status 3")])
async def test_a_failed_start_ends_the_host(rig: Rig, error: Exception) -> None:
    """Red when a start that fails leaves the process waiting, or a refused setting looks like a dead engine."""
    rig.start_error = error
    rig.host.begin()
    assert await rig.ended_with() is error
    assert [entry for entry in rig.journal if entry != "ended"] == (
        [] if isinstance(error, ConfigError) else [f"dying: {error}"]
    )
    assert await rig.host.stats() is None
    assert await rig.host.drain(1.0) == (0, 0)


@pytest.mark.parametrize(("at_once", "last"), [(False, "close"), (True, "kill")])
async def test_a_stop_leaves_nobody_without_a_word(rig: Rig, at_once: bool, last: str) -> None:
    """Red when sequences that are open at a stop never end, or a second signal waits for the worker's good-bye."""
    await rig.begin()
    rig.engine.open = 2
    rig.host.stop(at_once=at_once)
    assert await rig.ended_with() is None
    assert last in rig.journal
    told = [entry for entry in rig.journal if entry != last]
    assert told == ["abort_all: the engine core was stopped", "deliver: [99]", "ended"]


async def test_drain_waits_for_open_sequences(rig: Rig) -> None:
    """Red when a drain answers before the last sequence ended, or admission isn't stopped first."""
    await rig.begin()
    rig.engine.open = 2
    drain = asyncio.create_task(rig.host.drain(GUARD_S))
    assert await asyncio.to_thread(rig.engine.draining.wait, GUARD_S)
    await rig.host.stats()
    assert not drain.done()
    rig.engine.open = 0
    rig.host.submit([ABORT])
    assert await asyncio.wait_for(drain, GUARD_S) == (2, 0)


async def test_a_drain_aborts_what_its_cap_cuts_off(rig: Rig) -> None:
    """Red when a sequence that never ends keeps a drain from ending."""
    await rig.begin()
    rig.engine.open = 2
    assert await rig.host.drain(0.01) == (0, 2)
    assert rig.journal[1].startswith("abort_all: the engine core was drained for 0.01 s")


async def test_a_drain_ends_with_the_engine(rig: Rig) -> None:
    """Red when a drain waits its whole cap for an engine that has died."""
    await rig.begin()
    rig.engine.open = 2
    drain = asyncio.create_task(rig.host.drain(10 * GUARD_S))
    assert await asyncio.to_thread(rig.engine.draining.wait, GUARD_S)
    rig.host.stop()
    assert (await asyncio.wait_for(drain, GUARD_S))[1] == 0


async def test_calls_answer_with_values_and_end_with_the_thread(rig: Rig) -> None:
    """Red when a call that comes as the thread ends waits for ever."""
    await rig.begin()
    assert await rig.host.flush_cache() == 3
    rig.executor.held.clear()
    pending = asyncio.create_task(rig.host.stats())
    await asyncio.sleep(0)
    rig.host.stop()
    rig.executor.held.set()
    await rig.ended_with()
    (answer,) = await asyncio.wait_for(asyncio.gather(pending, return_exceptions=True), GUARD_S)
    assert isinstance(answer, dict | EngineDead), "run in the last turn, or refused"


async def test_readers_wait_while_the_inbox_is_full(rig: Rig) -> None:
    """Red when sessions read on although the engine thread can't take their commands, or never read again."""
    await rig.begin()
    rig.executor.held.clear()
    rig.host.submit([ABORT] * (MAX_BACKLOG + 2))
    room = asyncio.create_task(rig.host.room())
    await asyncio.sleep(0.01)
    assert not room.done()
    rig.executor.held.set()
    await asyncio.wait_for(room, GUARD_S)


# ------------------------------ the inbox


def test_an_item_put_while_another_is_taken_wakes_again() -> None:
    """Red when the wake-up is cleared after the items are taken: the last command would sleep with the thread."""
    inbox = Inbox()
    inbox.put([ABORT])
    assert inbox.take() == [ABORT]
    assert not select.select([inbox.fd], [], [], 0)[0]
    inbox.put([ABORT])
    assert select.select([inbox.fd], [], [], 0)[0]
    inbox.close()


def test_a_wake_up_without_items_is_cleared() -> None:
    """Red when an empty take leaves the descriptor readable: the poller would spin."""
    inbox = Inbox()
    inbox.wake()
    assert inbox.take() == []
    assert not select.select([inbox.fd], [], [], 0)[0]
    inbox.close()


def test_a_call_answers_once() -> None:
    """Red when a refused call is run later, or a call's error is swallowed on the engine thread."""
    refused = Call(lambda: 1)
    refused.refuse()
    with pytest.raises(EngineDead):
        refused.answer.result(0)
    failing = Call(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.run()
    with pytest.raises(ZeroDivisionError):
        failing.answer.result(0)
