"""How many tokens a second come out of the front: `generate()` over a real session, then over HTTP.

Starts the product with a fake device (a step of 0 ms), every process and this one pinned to the same two cores, and
decodes ROWS sequences at once. First this process is the frontend: `EngineClient` and `generate()`.
Then it is 256 streaming HTTP clients of the server's own frontend. Rates are those of the reference machine (see
`scale.py`); `raw_` ones are this machine's. Prints a table, then one JSON line:

    tok_s_256         tokens a second as text deltas out of generate()
    front_us_token    CPU of the frontend process per token of it, µs
    http_tok_s_256    tokens a second as server-sent events in the clients' hands
    tokens_per_event  tokens that one event carries
    event_age_ms      from the engine core to the HTTP client, 99th percentile; beside it the median and the oldest

With a step of 0 ms nothing paces the engine core: the age is the backlog of a saturated front.

    python scripts/bench/front_throughput.py [--rounds 5] [--tokens 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is run as a script

from frontend.engine_client import EngineClient
from frontend.generate import generate
from frontend.request import Sampling, TextRequest
from frontend.tokenizer import Tokenizer
from scripts.bench.scale import factor
from scripts.serving import TINY, Serving, served

ROWS = 256
CORES = 2
PROMPT_TOKENS = 16
WARM_UP_TOKENS = 20
POLL_S = 0.002
COUNTED = b'"completion_tokens":'
QUICK_S = 0.01
"""Looks at the engine core that took longer tell nothing."""
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
    ages_s: tuple[float, ...] = ()
    """See `sample_ages`."""

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
        http = uvloop.run(rounds(server, http_round, options.rounds, options.tokens))
    report(direct, http, pinned)
    return 0


def pin() -> int:
    """Keep this process, and all that it starts, on two cores; how many it got."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    return len(cores)


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


class Arrivals:
    """When how many tokens had come, over all streams."""

    def __init__(self) -> None:
        self.total = 0
        self._times: list[float] = []
        self._totals: list[int] = []

    def add(self, tokens: int) -> None:
        self.total += tokens
        self._times.append(time.perf_counter())
        self._totals.append(self.total)

    def reached(self, total: int) -> float:
        """When so many tokens had come."""
        return self._times[bisect.bisect_left(self._totals, total)]


class EventStream(asyncio.Protocol):
    """One streaming completion: counts events and tokens, keeps the end of the answer.

    One event may hold several tokens: each says how many there are so far.
    """

    def __init__(self, body: bytes, host: str, arrivals: Arrivals) -> None:
        self._request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (host.encode(), len(body), body)
        )
        self._arrivals = arrivals
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events = 0
        self.tokens = 0
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's isn't a subclass

    def data_received(self, data: bytes) -> None:
        # An event may be cut anywhere: count the first bytes of each that end in this piece.
        events = (self.tail[-5:] + data).count(b"data: ")
        self.events += events
        self.tail = (self.tail + data)[-4096:]
        counted = self.tail.rfind(COUNTED)
        end = self.tail.find(b",", counted)
        if counted >= 0 and end >= 0:
            tokens = int(self.tail[counted + len(COUNTED) : end])
            self._arrivals.add(tokens - self.tokens)
            self.tokens = tokens

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)

    def check(self, tokens: int) -> None:
        """Raises RuntimeError unless the answer ended as it should, with so many tokens."""
        if self.tokens != tokens or b"data: [DONE]" not in self.tail:
            raise RuntimeError(f"an answer of {tokens} tokens ended after {self.tokens}: {self.tail[-300:]!r}")


async def http_round(server: Serving, client: EngineClient, tokens: int) -> Sample:
    address = urlsplit(server.http)
    loop = asyncio.get_running_loop()
    before = (await client.get_stats()).counters.output_tokens
    arrivals = Arrivals()
    sampling = asyncio.create_task(sample_ages(client, before, arrivals, ROWS * tokens))
    scale = factor()
    began, cpu = time.perf_counter(), time.process_time()
    streams: list[EventStream] = []
    for row in range(ROWS):
        body = json.dumps(
            {
                "model": server.ready["info"]["model"],
                "prompt": prompt(row),
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        ).encode()
        make = functools.partial(EventStream, body, address.netloc, arrivals)
        _, stream = await loop.create_connection(make, str(address.hostname), address.port or 80)
        streams.append(stream)
    await asyncio.gather(*(stream.done for stream in streams))
    ended = time.perf_counter()
    for stream in streams:
        stream.check(tokens)
    events = sum(stream.events for stream in streams) - 2 * ROWS  # without each answer's usage and [DONE]
    cpu = time.process_time() - cpu
    return Sample(ROWS * tokens, events, ended - began, cpu, scale, tuple(await sampling))


async def sample_ages(client: EngineClient, base: int, arrivals: Arrivals, wanted: int) -> list[float]:
    """Ages in seconds: how long after a look at the engine core all it had then produced was with the clients.

    Each is an upper bound: counted from the question, which the engine core may have answered a little later.
    """
    looks: list[tuple[float, int]] = []
    while arrivals.total < wanted:
        asked = time.perf_counter()
        produced = (await client.get_stats()).counters.output_tokens - base
        if time.perf_counter() - asked < QUICK_S and 0 < produced < wanted:
            looks.append((asked, produced))
        await asyncio.sleep(POLL_S)
    return [arrivals.reached(produced) - asked for asked, produced in looks]


# ------------------------------ report


def report(direct: list[Sample], http: list[Sample], pinned: int) -> None:
    ages = sorted(1e3 * age for sample in http for age in sample.ages_s)
    print(f"{ROWS} rows, step of 0 ms, all processes on {pinned} cores; medians of {len(direct)} rounds")
    print(f"{'':<12} {'tok/s':>9} {'raw tok/s':>10} {'spread':>17} {'tok/event':>10} {'µs/token':>10}")
    for name, samples, what in (("generate()", direct, "frontend"), ("HTTP", http, "clients")):
        rates = [sample.rate for sample in samples]
        print(
            f"{name:<12} {scaled_rate(samples):>9.0f} {statistics.median(rates):>10.0f} "
            f"{min(rates):>8.0f}–{max(rates):<8.0f} {tokens_per_event(samples):>10.2f} {cpu_us(samples):>10.2f}"
            f"  (CPU of the {what})"
        )
    median, high, oldest = quantile(ages, 0.5), quantile(ages, 0.99), ages[-1]
    print(f"age of an event over HTTP: median {median:.1f} ms, p99 {high:.1f} ms, oldest {oldest:.1f} ms")
    result = {
        "tok_s_256": round(scaled_rate(direct)),
        "http_tok_s_256": round(scaled_rate(http)),
        "tokens_per_event": round(tokens_per_event(http), 3),
        "front_us_token": round(cpu_us(direct), 2),
        "event_age_ms": round(high, 1),
        "event_age_p50_ms": round(median, 1),
        "event_age_max_ms": round(oldest, 1),
        "raw_tok_s_256": round(statistics.median(sample.rate for sample in direct)),
        "raw_http_tok_s_256": round(statistics.median(sample.rate for sample in http)),
        "cores": pinned,
    }
    print(json.dumps(result))


def quantile(ordered: list[float], share: float) -> float:
    """Of sorted values; NaN of none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else math.nan


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
