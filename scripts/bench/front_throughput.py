"""How many tokens a second come out of the front: `generate()` over a real session, then over HTTP.

Starts the product with a fake device (a step of 0 ms), every process and this one pinned to the same two cores, and
decodes ROWS sequences at once. First this process is the frontend: `EngineClient` and `generate()`.
Then it is 256 streaming HTTP clients of the server's own frontend. Rates are those of the reference machine (see
`scale.py`); `raw_` ones are this machine's. Prints a table, then one JSON line:

    tok_s_256         tokens a second as text deltas out of generate()
    front_us_token    CPU of the frontend process per token of it, µs
    http_tok_s_256    tokens a second as server-sent events in the clients' hands
    tokens_per_event  tokens that one event carries
    event_age_ms      99th percentile; beside it the median, the oldest and the share of events older than 50 ms

An event's age counts from the moment that the engine thread has its oldest token until its bytes are in the client's
socket: when a client reads that waits for a core itself is told beside. A table says where events age; it comes from a
second server whose processes stamp what passes (`event_ages.py`), so that the rates are the product's alone. With a
step of 0 ms nothing paces the engine core: the age is the backlog of a saturated front. Over HTTP the client is
scheduled as a batch process (`give_way`), which lowers ages: as an ordinary one it takes the frontend's core.

    python scripts/bench/front_throughput.py [--rounds 5] [--tokens 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is run as a script

from frontend.engine_client import EngineClient
from frontend.generate import generate
from frontend.request import Sampling, TextRequest
from frontend.tokenizer import Tokenizer
from scripts.bench.event_ages import STAGES, Times, aged, read_stamps
from scripts.bench.http_streams import Answer, HttpStreams
from scripts.bench.inside.sitecustomize import FOLDER, entered
from scripts.bench.scale import factor
from scripts.serving import TINY, Serving, served

ROWS = 256
CORES = 2
PROMPT_TOKENS = 16
WARM_UP_TOKENS = 20
OLD_S = 0.05
FLAGS = ("--device=fake", "--load-format=dummy", f"--max-num-seqs={ROWS}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One round."""

    tokens: int
    events: int
    """Deltas or server-sent events with text."""
    seconds: float
    cpu_s: float
    """Of this process."""
    factor: float
    answers: tuple[Answer, ...] = ()
    """Those over HTTP."""

    @property
    def rate(self) -> float:
        """Tokens a second on this machine."""
        return self.tokens / self.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokens a second out of the frontend.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1000, help="output tokens of each of the sequences")
    options = parser.parse_args()
    pinned = pin()
    with tempfile.TemporaryDirectory() as folder, served(TINY, Path(folder) / "serve.log", FLAGS) as server:
        direct = uvloop.run(rounds(server, generate_round, options.rounds, options.tokens))
        give_way()
        http = uvloop.run(rounds(server, http_round, options.rounds, options.tokens))
    with tempfile.TemporaryDirectory() as folder:
        ages = measure_ages(Path(folder), options.rounds, options.tokens)
    report(direct, http, ages, pinned)
    return 0


def pin() -> int:
    """Keep this process, and all that it starts, on two cores; how many it got."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    return len(cores)


def give_way() -> None:
    """Have this process, from now on the client, wait for its share of a core instead of taking it at every event.

    Woken by each write, it cut the frontend short 6,475 times in a second of 7,603 slices, as no client on a machine of
    its own does. Its work stays on the same two cores; the processes it starts are scheduled as any.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


Round = Callable[[Serving, EngineClient, int], Awaitable[Sample]]


async def rounds(server: Serving, one: Round, count: int, tokens: int) -> list[Sample]:
    """A warm-up, then that many rounds."""
    client = EngineClient(server.engine, client_name="front_throughput")
    await client.start()
    await client.serving()
    await one(server, client, WARM_UP_TOKENS)
    samples = [await one(server, client, tokens) for _ in range(count)]
    await client.close()
    return samples


def prompt(row: int) -> list[int]:
    """Ids of a row's own prompt."""
    return [5 + (row * PROMPT_TOKENS + at) % 4000 for at in range(PROMPT_TOKENS)]


# ------------------------------ generate()


async def generate_round(server: Serving, client: EngineClient, tokens: int) -> Sample:
    tokenizer = Tokenizer.load(TINY)
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)

    async def read(row: int) -> tuple[int, int]:
        count = events = 0
        async for deltas in generate(client, tokenizer, TextRequest(prompt(row), sampling)):
            for delta in deltas:
                count += len(delta.token_ids)
                events += 1
        return count, events

    scale = factor()
    began, cpu = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*map(read, range(ROWS)))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    total = sum(count for count, _ in counts)
    if total != ROWS * tokens:
        raise RuntimeError(f"{total} tokens came, {ROWS * tokens} were asked for")
    return Sample(total, sum(events for _, events in counts), seconds, cpu, scale)


# ------------------------------ HTTP


async def http_round(server: Serving, _: EngineClient, tokens: int) -> Sample:
    streams = HttpStreams(server.http, server.ready["info"]["model"])
    scale = factor()
    began, cpu = time.perf_counter(), time.process_time()
    answers = await asyncio.gather(*(streams.stream(prompt(row), tokens) for row in range(ROWS)))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return Sample(ROWS * tokens, sum(answer.events for answer in answers), seconds, cpu, scale, tuple(answers))


def measure_ages(folder: Path, count: int, tokens: int) -> tuple[Times, Times]:
    """`event_ages.aged` over rounds with a server that stamps, which costs it some µs an event."""
    with entered(**{FOLDER: folder}), served(TINY, folder / "serve.log", FLAGS) as server:
        samples = uvloop.run(rounds(server, http_round, count, tokens))
    return aged(read_stamps(folder), [answer for sample in samples for answer in sample.answers])


# ------------------------------ report


def report(direct: list[Sample], http: list[Sample], ages: tuple[Times, Times], pinned: int) -> None:
    print(f"{ROWS} rows, step of 0 ms, all processes on {pinned} cores; medians of {len(direct)} rounds")
    print(f"{'':<12} {'tok/s':>9} {'raw tok/s':>10} {'spread':>17} {'tok/event':>10} {'µs/token':>10}")
    for name, samples, what in (("generate()", direct, "frontend"), ("HTTP", http, "clients")):
        rates = [sample.rate for sample in samples]
        print(
            f"{name:<12} {scaled_rate(samples):>9.0f} {statistics.median(rates):>10.0f} "
            f"{min(rates):>8.0f}–{max(rates):<8.0f} {tokens_per_event(samples):>10.2f} {cpu_us(samples):>10.2f}"
            f"  (CPU of the {what})"
        )
    result = {
        "tok_s_256": round(scaled_rate(direct)),
        "http_tok_s_256": round(scaled_rate(http)),
        "tokens_per_event": round(tokens_per_event(http), 3),
        "front_us_token": round(cpu_us(direct), 2),
        **report_ages(*ages),
        "raw_tok_s_256": round(statistics.median(sample.rate for sample in direct)),
        "raw_http_tok_s_256": round(statistics.median(sample.rate for sample in http)),
        "cores": pinned,
    }
    print(json.dumps(result))


def report_ages(stages: Times, late: Times) -> dict[str, float]:
    """Print where events age; the ages' keys of the result."""
    total = stages.sum(axis=1)
    print(f"\nage of {len(total)} events over HTTP, ms {'median':>17} {'p99':>8} {'p99.9':>8} {'oldest':>8}")
    lines = [*zip(STAGES, stages.T, strict=True), ("the event's age", total), ("read by the client later by", late)]
    for name, seconds in lines:
        figures = 1e3 * np.quantile(seconds, (0.5, 0.99, 0.999, 1.0))
        print(f"{name:<38} " + " ".join(f"{figure:>8.1f}" for figure in figures))
    median, high, oldest = (1e3 * np.quantile(total, (0.5, 0.99, 1.0))).round(1).tolist()
    return {
        "event_age_ms": high,
        "event_age_p50_ms": median,
        "event_age_max_ms": oldest,
        "events_over_50_ms": float((total > OLD_S).mean()),
    }


def scaled_rate(samples: list[Sample]) -> float:
    """Tokens a second of the reference machine, median."""
    return statistics.median(sample.rate / sample.factor for sample in samples)


def tokens_per_event(samples: list[Sample]) -> float:
    return sum(sample.tokens for sample in samples) / sum(sample.events for sample in samples)


def cpu_us(samples: list[Sample]) -> float:
    """CPU of this process per token, µs of the reference machine, median."""
    return statistics.median(1e6 * sample.cpu_s / sample.tokens * sample.factor for sample in samples)


if __name__ == "__main__":
    sys.exit(main())
