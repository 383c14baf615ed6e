"""How many events a second one frontend process streams over HTTP, what four do, and what streams cost the engine core.

Runs the product with a fake device whose steps are paced, so that every event holds one token, and load clients in
processes of their own. Where cores allow, each frontend has one to itself, the engine core and the worker theirs, and
the clients the rest; on two, a frontend has one and all others share the other. Prints a table, then one JSON line:

    events_s_1           events a second of one frontend at LOAD of its core, as many as the pace asks for …
    tokens_per_event_1   … and tokens that one carries: one where the front keeps up
    front_us_event       CPU of the frontend process per event, µs, all its threads
    events_s_core        what a whole core of that is: 1 / front_us_event
    events_s_4, tokens_per_event_4   the same pace with four frontends and four times the streams
    scaling              events_s_4 / events_s_1
    engine_us_step       CPU of the engine-core process per step, µs, with one frontend: by number of streams of one
                         sequence each (rows grow with them), and, as ROWS/STREAMS, by streams that share the same rows
    cores                that this run had; fewer than FOUR_CORES: no run with four frontends, its keys are null

    python scripts/bench/front_scaling.py
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from greenlane.engine.v1 import engine_pb2 as pb
from greenlane.engine.v1 import engine_pb2_grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is run as a script

from scripts.bench.cores import available, cpu_seconds, pin
from scripts.bench.inside.sitecustomize import PACE, SECONDS, entered
from scripts.bench.load_clients import Count, Load, clients
from scripts.serving import TINY, Serving, served

STREAMS = 256
"""Of each frontend."""
LOAD = 0.8
"""Of a frontend's core: as much as it can do all the time, with room for its own upkeep."""
FIRST_PACE_S = STREAMS / 8000
FOUR = 4
FOUR_CORES = 12
WINDOW_S = 2.0
LONG_WINDOW_S = 4.0
SETTLE_S = 0.5
TOKENS = 2000
CLIENTS = 2
"""Processes for each frontend."""
BY_STREAMS = (1, 64, 256, 1024)
SHARED = ((2, 128), (16, 16), (256, 1))
"""(streams, sequences of each): the same rows."""
SLOWEST_STEP_S = 0.01
"""Of the engine core's measurements, unless the front needs longer; the pace doesn't count as CPU."""
FLAGS = ("--device=fake", "--load-format=dummy", "--max-num-seqs=1024", "--kv-cache-memory=13GiB")


@dataclass(frozen=True, slots=True)
class Measured:
    """One window."""

    events_s: float
    tokens_per_event: float
    front_us_event: float
    engine_us_step: float
    step_ms: float
    busiest_client: float
    """Share of a core."""


class Bench:
    """A running server with its processes placed."""

    def __init__(self, server: Serving, pace: Path, frontends: int) -> None:
        self._server = server
        self._pace = pace
        self._frontends = frontends
        roles = server.roles()
        self._fronts = [pid for pid, role in roles.items() if role.startswith("frontend")]
        (self._engine,) = (pid for pid, role in roles.items() if role == "engine core")
        self._client_cpus = self._place(roles)
        self._stub = engine_pb2_grpc.EngineStub(grpc.insecure_channel(server.engine))

    def _place(self, roles: dict[int, str]) -> list[int]:
        """Pin every process of the server; the CPUs that are left for clients."""
        cpus = available()
        fronts, rest = cpus[: self._frontends], cpus[self._frontends :]
        shared = rest if len(rest) < 6 else rest[:3]
        for pid in roles:
            pin(pid, shared)
        for pid, cpu in zip(self._fronts, fronts, strict=True):
            pin(pid, [cpu])
        if len(rest) >= 6:
            pin(self._engine, rest[:2])
        return rest if len(rest) < 6 else rest[3:]

    def measure(self, streams: int, step_s: float, *, n: int = 1, window_s: float = WINDOW_S) -> Measured:
        """A window of so many streams, of n sequences each, that decode at this pace."""
        with self._pace.open("r+b") as file:  # never shorter: the worker has it in its memory
            file.write(SECONDS.pack(step_s))
        with clients(self._loads(streams, n)) as pipes:
            begin = time.monotonic() + SETTLE_S
            for pipe in pipes:
                pipe.send((begin, begin + window_s))
            before = self._meters(begin)
            after = self._meters(begin + window_s)
            counts: list[Count] = [pipe.recv() for pipe in pipes]
        steps, engine, front, seconds = (late - early for early, late in zip(before, after, strict=True))
        events = sum(count.events for count in counts)
        return Measured(
            events_s=sum(count.events / count.seconds for count in counts),
            tokens_per_event=sum(count.tokens for count in counts) / events if n == 1 else math.nan,
            front_us_event=1e6 * front / events,
            engine_us_step=1e6 * engine / steps,
            step_ms=1e3 * seconds / steps,
            busiest_client=max(count.cpu_s / count.seconds for count in counts),
        )

    def _loads(self, streams: int, n: int) -> list[Load]:
        count = min(streams, CLIENTS * self._frontends)
        shares = [streams // count + (place < streams % count) for place in range(count)]
        info = self._server.ready["info"]
        return [Load(self._server.http, info["model"], share, n, TOKENS, self._client_cpus) for share in shares]

    def _meters(self, when: float) -> tuple[float, float, float, float]:
        """At that time: steps so far, CPU of the engine core and of the frontends, the time."""
        time.sleep(max(0.0, when - time.monotonic()))
        stats: pb.GetStatsResponse = self._stub.GetStats(pb.GetStatsRequest(), timeout=10)
        fronts = sum(cpu_seconds(pid) for pid in self._fronts)
        return float(stats.counters.steps), cpu_seconds(self._engine), fronts, time.monotonic()


@contextmanager
def bench(frontends: int) -> Iterator[Bench]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pace = folder / "pace"
        pace.write_bytes(SECONDS.pack(0.0))
        stack.enter_context(entered(**{PACE: pace}))
        flags = (*FLAGS, f"--frontends={frontends}")
        yield Bench(stack.enter_context(served(TINY, folder / "serve.log", flags)), pace, frontends)


def main() -> int:
    argparse.ArgumentParser(description="Events a second of one frontend and of four.").parse_args()
    cores = len(available())
    if cores < 2:
        sys.exit("error: a frontend needs a core, and all that is around it another one")
    lines: list[tuple[str, Measured]] = []

    def note(name: str, measured: Measured) -> Measured:
        lines.append((name, measured))
        return measured

    with bench(1) as one:
        first = note("1 frontend", one.measure(STREAMS, FIRST_PACE_S))
        event_s = 1e-6 * first.front_us_event
        pace = STREAMS * event_s / LOAD
        alone = note(f"1 frontend, {LOAD:.0%} of its core", one.measure(STREAMS, pace, window_s=LONG_WINDOW_S))
        engine: dict[str, float] = {}
        for streams in BY_STREAMS:
            step_s = max(SLOWEST_STEP_S, 2 * streams * event_s)
            engine[str(streams)] = note(f"{streams} streams", one.measure(streams, step_s)).engine_us_step
        for streams, n in SHARED:
            step_s = max(SLOWEST_STEP_S, 2 * streams * n * event_s)
            row = f"{streams * n} rows of {streams} streams"
            engine[f"{streams * n}/{streams}"] = note(row, one.measure(streams, step_s, n=n)).engine_us_step
    four = None
    if cores >= FOUR_CORES:
        with bench(FOUR) as many:
            four = note(f"{FOUR} frontends", many.measure(FOUR * STREAMS, pace, window_s=LONG_WINDOW_S))
    report(lines, alone, four, engine, cores)
    return 0


def report(
    lines: list[tuple[str, Measured]], alone: Measured, four: Measured | None, engine: dict[str, float], cores: int
) -> None:
    head = ("events/s", "tok/event", "front µs/event", "core µs/step", "step ms", "client CPU")
    print(f"{'on ' + str(cores) + ' cores':<28}" + "".join(f"{name:>16}" for name in head))
    for name, one in lines:
        figures = (one.events_s, one.tokens_per_event, one.front_us_event, one.engine_us_step, one.step_ms)
        print(f"{name:<28}" + "".join(f"{figure:>16.2f}" for figure in (*figures, one.busiest_client)))
    result = {
        "events_s_1": round(alone.events_s),
        "tokens_per_event_1": round(alone.tokens_per_event, 3),
        "front_us_event": round(alone.front_us_event, 2),
        "events_s_core": round(1e6 / alone.front_us_event),
        "events_s_4": None if four is None else round(four.events_s),
        "tokens_per_event_4": None if four is None else round(four.tokens_per_event, 3),
        "scaling": None if four is None else round(four.events_s / alone.events_s, 2),
        "engine_us_step": {name: round(value) for name, value in engine.items()},
        "cores": cores,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
