"""What the engine core costs the host: CPU of its engine thread per step, of publication, of admission.

Runs the product's own loop with default settings (engine thread, scheduler, ZMQ executor, a worker process with the
fake device, the session protocol) over decode rows x contexts. A step's figure is all CPU time of the engine thread
divided by steps, waiting and hand-over included. Rows share their prompt in groups of 32, so that set-up stays short;
what a step does depends on rows, not on where their pages are.

A sample spans as many steps as pass between two visits of a row (its ids and full pages are taken over in stretches).
Rows of short contexts start in the same step and are visited in the same few steps from then on, those of long ones
start one by one: the median of samples that are shorter would leave the visits out of the one and not of the other.
Contexts take turns, so that what else the machine does falls on all of them. Prints a table, then one JSON line:

    step_ms_256     engine thread per step at 256 decode rows, worst context
    context_growth  the same at 32k over 1k
    publish_ms_256  a step's output of 256 rows to serialized StepOutput, on the gRPC thread
    admit_ms_8192   an 8192-token prompt: parsing, admission, and its first plan on the way to the worker
    hash_ms_8192    its prefix hash chain, which frontends compute

    python scripts/bench/engine_overhead.py [--windows 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from greenlane.engine.v1 import engine_pb2 as pb

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is run as a script

from access.folders import private_folder
from engine_core.cache.watch import CacheWatch
from engine_core.config import EngineConfig
from engine_core.engine import Engine, EngineStats
from engine_core.executor.processes import worker_command
from engine_core.executor.zmq import ZmqExecutor
from engine_core.host import EngineHost, Publish
from engine_core.main import build_engine, model_limits, worker_config
from engine_core.model_config import load_model_config
from engine_core.request import Command, Ids, ModelLimits, Output, Request, prefix_chain
from engine_core.scheduling.rows import STRETCH_PAGES
from engine_core.session import PROTOCOL_VERSION, Session
from scripts.bench.scale import factor
from scripts.serving import TINY

ROWS = (1, 16, 64, 256)
CONTEXTS = (1024, 8192, 32768)
MAX_MODEL_LEN = 40960
GROUP = 32
"""Rows that share a prompt but for its last tokens."""
ROUNDS = 3
"""Turns of each context."""
ADMISSIONS = 15
KV_BYTES = 1 << 36
"""The fake device stores 8 bytes a token whatever the model's shape; this is room for all rows at the worst context."""
TIMEOUT_S = 600.0


class MeteredEngine:
    """The engine as its thread sees it, with that thread's CPU time by window of steps and by admission."""

    def __init__(self, engine: Engine, window: int) -> None:
        """`window` is the least number of steps of a sample."""
        self._engine = engine
        self._window = window
        self.step_ms: list[float] = []
        self.admit_ms: list[float] = []
        self._window_began: float | None = None
        self._window_steps = 0
        self._window_turns = 0
        self._admission_began: float | None = None

    def restart(self) -> None:
        """Forget the samples; the next window begins with the next step."""
        self.step_ms = []
        self._window_began = None

    def step(self, now: float) -> None:
        self._window_turns += 1
        if self._window_began is None or self._window_turns > self._window:  # about one step a turn
            self._turn_window()
        self._engine.step(now)
        if self._admission_began is not None:
            self.admit_ms.append(1e3 * (time.thread_time() - self._admission_began) * factor())
            self._admission_began = None

    def _turn_window(self) -> None:
        """Close the window, if it spans enough steps, and begin the next: its first turn is the one that starts now."""
        cpu = 0.0 if self._window_began is None else time.thread_time() - self._window_began
        steps = self._engine.stats().steps
        if self._window_began is not None:
            if steps - self._window_steps < self._window:
                return
            self.step_ms.append(1e3 * cpu * factor() / (steps - self._window_steps))
        self._window_turns, self._window_steps = 1, steps
        self._window_began = time.thread_time()

    def submit(self, command: Command, now: float) -> None:
        if isinstance(command, Request) and self._admission_began is None:
            self._admission_began = time.thread_time()
        self._engine.submit(command, now)

    def next_wakeup(self, now: float) -> float | None:
        return self._engine.next_wakeup(now)

    def drain(self) -> None:
        self._engine.drain()

    def abort_all(self, cause: str) -> None:
        self._engine.abort_all(cause)

    def fail_all(self, cause: str) -> None:
        self._engine.fail_all(cause)

    def flush_cache(self) -> int:
        return self._engine.flush_cache()

    def watch_cache(self) -> CacheWatch:
        return self._engine.watch_cache()

    def unwatch_cache(self, watch: CacheWatch) -> None:
        self._engine.unwatch_cache(watch)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def open_count(self) -> int:
        return self._engine.open_count


@dataclass
class Frontend:
    """The session's far end: takes every output as the gRPC thread does, and acknowledges it."""

    session: Session
    publish_ms: list[float] = field(default_factory=list)
    decoding: set[int] = field(default_factory=set)
    finished: int = 0
    error: BaseException | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            began = time.thread_time()
            self.session.publish(output)
            message = self.session.take(time.monotonic())
            data = b"" if message is None else message.SerializeToString()
            self.session.written(time.monotonic())
            cpu = time.thread_time() - began
            if output.tokens.size == max(ROWS):
                self.publish_ms.append(1e3 * cpu * factor())
            self._read(data)
        self.changed.set()

    def _read(self, data: bytes) -> None:
        output = pb.SessionResponse.FromString(data).output
        self.decoding.update(np.frombuffer(output.numbers, "<u8").tolist())
        self.decoding.difference_update(finish.number for finish in output.finishes)
        self.finished += len(output.finishes)
        self.session.receive(pb.SessionRequest(ack=output.sequence), time.monotonic())

    async def dying(self, cause: str) -> None:
        print(f"the engine died: {cause}", file=sys.stderr)

    def ended(self, error: BaseException | None) -> None:
        self.error = error
        self.changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for a condition that outputs bring about. Raises what ended the engine, if that comes first."""
        async with asyncio.timeout(TIMEOUT_S):
            while not reached():
                if self.error is not None:
                    raise self.error
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Bench:
    host: EngineHost
    engine: MeteredEngine
    frontend: Frontend
    limits: ModelLimits
    next_number: int = 1

    async def steps(self, rows: int, context: int, windows: int) -> list[float]:
        """Samples of engine-thread milliseconds per step with that many rows decoding at that context."""
        first = self.next_number
        for group in range(0, rows, GROUP):
            shared = prompt(context - 32, seed=group)
            for row in range(group, min(rows, group + GROUP)):
                tail = prompt(32 + row % self.limits.page_size, seed=1_000_000 + row)
                ids = np.concatenate((shared, tail))
                self.hand_over(self.message(ids, max_tokens=MAX_MODEL_LEN - context - 64))
        await self.frontend.until(lambda: len(self.frontend.decoding) == rows)
        await asyncio.to_thread(time.sleep, 0.2)
        self.engine.restart()
        await self.frontend.until(lambda: len(self.engine.step_ms) > windows)
        samples = self.engine.step_ms[1:]
        await self.abort(first)
        return samples

    async def admissions(self) -> tuple[list[float], list[float]]:
        """Milliseconds of admission and of hashing, for single prompts of 8192 tokens on an idle engine."""
        samples: list[float] = []
        hashing: list[float] = []
        for index in range(ADMISSIONS):
            first, ids = self.next_number, prompt(8192, seed=2_000_000 + index)
            hashing.append(timed_ms(partial(prefix_chain, ids, self.limits.page_size, None)))
            message = self.message(ids, max_tokens=2)
            self.engine.admit_ms.clear()
            edge = timed_ms(partial(self.hand_over, message))
            await self.frontend.until(lambda: bool(self.engine.admit_ms))
            samples.append(edge + self.engine.admit_ms[0])
            await self.abort(first)
        return samples, hashing

    def message(self, ids: Ids, max_tokens: int) -> bytes:
        """One request as a frontend sends it."""
        add = pb.AddRequest(
            number=self.next_number,
            prompt_ids=ids.tobytes(),
            prefix_hashes=prefix_chain(ids, self.limits.page_size, None),
            sampling=pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        )
        self.next_number += 1
        return pb.SessionRequest(adds=[add]).SerializeToString()

    def hand_over(self, message: bytes) -> None:
        """Parse and check a message and give its commands to the engine thread, as the gRPC thread does."""
        self.host.submit(self.frontend.session.receive(pb.SessionRequest.FromString(message), time.monotonic()))

    async def abort(self, first: int) -> None:
        """End all requests from `first` on and wait until they have said so."""
        numbers = np.arange(first, self.next_number, dtype="<u8")
        message = pb.SessionRequest(aborts=numbers.tobytes())
        self.host.submit(self.frontend.session.receive(message, time.monotonic()))
        await self.frontend.until(lambda: self.frontend.finished == self.next_number - 1)


def timed_ms(work: Callable[[], object]) -> float:
    """Scaled CPU milliseconds of this thread."""
    began = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - began) * factor()


def prompt(length: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(3, 4000, length, dtype=np.int32)


@asynccontextmanager
async def engine_core(folder: Path, sockets: Path) -> AsyncIterator[Bench]:
    """The engine thread and its worker process, as `greenlane engine` runs them, without a network."""
    model_file = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**model_file, "max_position_embeddings": MAX_MODEL_LEN}))
    config = EngineConfig(model=str(folder), device="fake", load_format="dummy", kv_cache_memory=KV_BYTES)
    config.check()
    model = load_model_config(folder)
    built: list[tuple[MeteredEngine, ModelLimits]] = []

    def start(wake_fd: int, publish: Publish) -> tuple[MeteredEngine, ZmqExecutor]:
        executor = ZmqExecutor(
            sockets / "worker-0.sock",
            command=worker_command(0, "warning"),
            wake_fd=wake_fd,
            gpu_wait_timeout=config.gpu_wait_timeout,
            worker_timeout=config.worker_timeout,
            start_timeout=config.start_timeout,
        )
        ready = executor.start(worker_config(config, folder), lambda loading: None)
        engine = MeteredEngine(build_engine(config, model, ready, executor, publish), STRETCH_PAGES * config.page_size)
        built.append((engine, model_limits(config, model, ready)))
        return engine, executor

    limits = ModelLimits(model.vocab_size, MAX_MODEL_LEN, config.page_size, 1, model.eos_token_ids)
    session = Session(1, limits, pb.GetInfoResponse(), now=time.monotonic(), draw_seed=lambda: 1)
    session.receive(pb.SessionRequest(hello=pb.Hello(protocol_version=PROTOCOL_VERSION)), time.monotonic())
    session.take(time.monotonic())
    session.written(time.monotonic())
    frontend = Frontend(session)
    host = EngineHost(start, frontend, asyncio.get_running_loop())
    host.begin()
    try:
        while not built:
            if frontend.error is not None:
                raise frontend.error
            await asyncio.sleep(0.05)
        engine, limits = built[0]
        yield Bench(host, engine, frontend, limits)
    finally:
        host.stop()
        await host.join()


async def measure(windows: int) -> dict[str, float]:
    with private_folder() as sockets, tempfile.TemporaryDirectory() as folder:
        async with engine_core(Path(folder), sockets) as bench:
            table: dict[tuple[int, int], list[float]] = {}
            for rows in ROWS:
                for context in CONTEXTS * ROUNDS:
                    table.setdefault((rows, context), []).extend(await bench.steps(rows, context, windows))
                for context in CONTEXTS:
                    show(f"step, {rows} rows at {context}", table[rows, context])
            admissions, hashing = await bench.admissions()
            show("admission of 8192 tokens", admissions)
            show("hash chain of 8192 tokens", hashing)
            show("publication of 256 rows", bench.frontend.publish_ms)
    worst = {context: statistics.median(table[max(ROWS), context]) for context in CONTEXTS}
    return {
        "step_ms_256": round(max(worst.values()), 4),
        "context_growth": round(worst[32768] / worst[1024], 3),
        "publish_ms_256": round(statistics.median(bench.frontend.publish_ms), 4),
        "admit_ms_8192": round(statistics.median(admissions), 4),
        "hash_ms_8192": round(statistics.median(hashing), 4),
    }


def show(what: str, samples: list[float]) -> None:
    low, high = min(samples), max(samples)
    print(f"{what:<28} {statistics.median(samples):8.3f} ms   ({low:.3f} .. {high:.3f}, {len(samples)} samples)")


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU of the engine core per step, publication and admission.")
    parser.add_argument("--windows", type=int, default=4, help=f"samples of each of {ROUNDS} turns of a context")
    options = parser.parse_args()
    print(f"{'scaled CPU time':<28} {'median':>8}")
    result = asyncio.run(measure(options.windows))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
