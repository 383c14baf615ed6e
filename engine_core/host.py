"""The engine thread: inbox → engine.step → outputs to the gRPC thread → wait; and how that ends.

Owns the thread, the inbox and the hand-over between the two threads. Decides nothing about requests (`engine.py`) and
speaks to no client (`service.py`). Everything of the engine and the executor is called on this thread alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from engine_core.cache.watch import CacheWatch, RemovedPages, StoredPages
from engine_core.errors import ConfigError, EngineDead, describe_chain
from engine_core.executor.base import Executor
from engine_core.log import event
from engine_core.request import Command, Output

log = logging.getLogger(__name__)

MAX_BACKLOG = 8192
"""Commands that the engine thread hasn't taken yet; beyond, sessions are read no further."""
HEALTH_FIRST_S = 1.0
"""How long failing the open requests waits for health to turn first."""

T = TypeVar("T")


class Engine(Protocol):
    """What the thread needs of `engine.Engine`."""

    def submit(self, command: Command, now: float) -> None: ...
    def step(self, now: float) -> None: ...
    def next_wakeup(self, now: float) -> float | None: ...
    def drain(self) -> None: ...
    def abort_all(self, cause: str) -> None: ...
    def fail_all(self, cause: str) -> None: ...
    def flush_cache(self) -> int: ...
    def watch_cache(self) -> CacheWatch: ...
    def unwatch_cache(self, watch: CacheWatch) -> None: ...
    def stats(self) -> Any: ...

    @property
    def open_count(self) -> int: ...


class WaitingExecutor(Executor, Protocol):
    """An executor that the thread can wait on, and end."""

    def wait(self, timeout: float | None) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


Publish = Callable[[list[Output]], None]


class Listener(Protocol):
    """What the gRPC side does at the turns of the engine's life. Called on the asyncio loop, never blocking."""

    def deliver(self, outputs: list[Output]) -> None:
        """Outputs of one engine step."""

    async def dying(self, cause: str) -> None:
        """The engine has failed; open requests are failed once this returns."""

    def ended(self, error: BaseException | None) -> None:
        """The thread is over: None after `stop`, else what ended it."""


class Call:
    """A function to run on the engine thread between steps, and its answer."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.answer: Future[Any] = Future()

    def run(self) -> None:
        if self.answer.set_running_or_notify_cancel():
            try:
                self.answer.set_result(self._function())
            except Exception as error:
                self.answer.set_exception(error)
                raise

    def refuse(self) -> None:
        """The thread is over; nobody will run this."""
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(EngineDead("the engine has ended"))


class Inbox:
    """Commands and calls for the engine thread, from any thread; each put wakes the thread through `fd`."""

    def __init__(self) -> None:
        self._items: deque[Command | Call] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: Iterable[Command | Call]) -> None:
        self._items.extend(items)
        self.wake()

    def wake(self) -> None:
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[Command | Call]:
        """Everything put so far, in order. The wake-ups are cleared first: what is put after that wakes again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        os.close(self.fd)


class EngineHost:
    """Runs an engine on a thread of its own. `Core` of the service; its coroutines belong to the asyncio loop.

    `start` builds executor and engine on the thread; it may raise, and is called off through the inbox's descriptor
    (`stop`). Its `publish` argument is the engine's way out.
    """

    def __init__(
        self,
        start: Callable[[int, Publish], tuple[Engine, WaitingExecutor]],
        listener: Listener,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._listener = listener
        self._loop = loop
        self._clock = clock
        self._inbox = Inbox()
        self._outputs: list[Output] = []
        self._roomy = asyncio.Event()
        self._idle: asyncio.Event | None = None
        self._stopping = False
        self._kill_worker = False
        self._over = False
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -------------------------- from the asyncio loop

    def begin(self) -> None:
        self._thread.start()

    def submit(self, commands: Iterable[Command]) -> None:
        """Hand commands over, in order; dropped once the thread is over."""
        if not self._over:
            self._inbox.put(commands)

    async def room(self) -> None:
        """Wait while the engine thread has too many commands still to take."""
        while len(self._inbox) > MAX_BACKLOG and not self._over:
            self._roomy.clear()
            await self._roomy.wait()

    async def stats(self) -> Any:
        """The engine's own, fresh; None before there is an engine or after it."""
        if self._engine is None or self._over:
            return None
        return await self._call(self._engine.stats)

    async def flush_cache(self) -> int:
        """Drop unreferenced prefix-cache pages; how many."""
        engine = self._engine
        if engine is None or self._over:
            return 0

        return await self._call(engine.flush_cache)

    async def watch_cache(self) -> CacheWatch:
        """Begin to note the prefix cache's changes, until `unwatch_cache`. Raises EngineDead without an engine."""
        return await self._call(self._serving_engine().watch_cache)

    async def read_cache(self, watch: CacheWatch, most: int) -> list[StoredPages | RemovedPages]:
        """Its oldest `most` changes. Raises EngineDead."""
        return await self._call(functools.partial(watch.read, most))

    def unwatch_cache(self, watch: CacheWatch) -> None:
        """Note nothing more for it."""
        if self._engine is not None and not self._over:
            self._inbox.put([Call(functools.partial(self._engine.unwatch_cache, watch))])

    def _serving_engine(self) -> Engine:
        if self._engine is None or self._over:
            raise EngineDead("there is no engine")
        return self._engine

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Stop admission, let open sequences finish for `timeout_s`, abort the rest; (finished, aborted)."""
        engine = self._engine
        if engine is None or self._over:
            return 0, 0
        self._idle = asyncio.Event()

        def begin() -> int:
            engine.drain()
            return engine.open_count

        def abort() -> int:
            left = engine.open_count
            if left:
                engine.abort_all(f"the engine core was drained for {timeout_s:g} s and is stopping")
            return left

        opened = await self._call(begin)
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            aborted = await self._call(abort)
            return opened - aborted, aborted
        return opened, 0

    def stop(self, *, at_once: bool = False) -> None:
        """End the thread. What is still open fails with UNAVAILABLE; the worker is asked to leave, or killed."""
        self._kill_worker = self._kill_worker or at_once
        self._stopping = True
        if not self._over:
            self._inbox.wake()

    async def join(self) -> None:
        """Wait for the thread's end; the host can't be used any more."""
        await asyncio.to_thread(self._thread.join)
        self._inbox.close()

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine thread, between steps. Raises EngineDead when the thread ends first."""
        call = Call(function)
        self._inbox.put([call])
        if self._over:
            call.refuse()
        answer: T = await asyncio.wrap_future(call.answer)
        return answer

    # -------------------------- on the engine thread

    def _run(self) -> None:
        executor: WaitingExecutor | None = None
        error: BaseException | None = None
        try:
            engine, executor = self._start(self._inbox.fd, self._outputs.extend)
            self._engine = engine
            while not self._stopping:
                self._turn(engine, executor)
            self._leave(engine, executor)
        except BaseException as caught:
            error = caught
            self._fail(caught, executor)
        finally:
            self._end(error)

    def _turn(self, engine: Engine, executor: WaitingExecutor) -> None:
        """One step and the wait for the next reason to take one."""
        self._take_inbox(engine)
        engine.step(self._clock())
        self._hand_over()
        self._report_idle(engine)
        executor.wait(self._until(engine.next_wakeup(self._clock())))

    def _leave(self, engine: Engine, executor: WaitingExecutor) -> None:
        """Stopped on purpose: nothing is left open without a word."""
        if engine.open_count:
            engine.abort_all("the engine core was stopped")
        self._hand_over()
        if self._kill_worker:
            executor.kill()
        else:
            executor.close()

    def _end(self, error: BaseException | None) -> None:
        self._over = True
        for item in self._inbox.take():
            if isinstance(item, Call):
                item.refuse()
        self._notify(self._roomy.set)
        if self._idle is not None:
            self._notify(self._idle.set)
        self._notify(self._listener.ended, error)

    def _take_inbox(self, engine: Engine) -> None:
        items = self._inbox.take()
        if len(items) > MAX_BACKLOG:
            self._notify(self._roomy.set)
        for item in items:
            if isinstance(item, Call):
                item.run()
            else:
                engine.submit(item, self._clock())

    def _hand_over(self) -> None:
        """One wake-up of the other thread for everything that a step published."""
        if self._outputs:
            outputs, self._outputs[:] = self._outputs.copy(), []
            self._notify(self._listener.deliver, outputs)

    def _report_idle(self, engine: Engine) -> None:
        if self._idle is not None and engine.open_count == 0:
            self._notify(self._idle.set)

    def _until(self, when: float | None) -> float | None:
        return None if when is None else max(0.0, when - self._clock())

    def _fail(self, error: BaseException, executor: WaitingExecutor | None) -> None:
        """Health first, then every open request (what the failing step had published goes with them), then workers."""
        cause = describe_chain(error)
        if self._engine is None and (self._stopping or isinstance(error, ConfigError)):
            return  # called off, or refused, before anything was served: not a failure of the engine
        event(log, logging.ERROR, "engine_failed", cause=cause)
        try:
            asyncio.run_coroutine_threadsafe(self._listener.dying(cause), self._loop).result(HEALTH_FIRST_S)
        except (TimeoutError, RuntimeError) as late:
            event(log, logging.ERROR, "health_not_told", cause=describe_chain(late))
        try:
            if self._engine is not None:
                self._engine.fail_all(cause)
            self._hand_over()
        finally:
            if executor is not None:
                executor.kill()

    def _notify(self, function: Callable[..., None], *arguments: object) -> None:
        """Call on the asyncio loop; a loop that is closed has nobody left to tell."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            event(log, logging.DEBUG, "loop_closed")
