"""Load with cancellations: does every accepted request end exactly once, and is everything given back?

2,000 requests from 64 clients, half over HTTP and half over gRPC, streamed, a fifth of them cancelled at a random
moment. Prompts share beginnings, so that the prefix cache works; some ask for two sequences. Afterwards the engine
core's counters must add up, no page may be referenced, and memory and descriptors of every process must be as they
were half-way.

Prints a table, then one JSON line; `ok` says whether everything held, and so does the exit status.

    python scripts/bench/soak.py [--requests 2000] [--clients 64] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
from greenlane.engine.v1 import engine_pb2, engine_pb2_grpc
from greenlane.text.v1 import text_pb2, text_pb2_grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is run as a script

from scripts.serving import TINY, Serving, open_descriptors, resident_bytes, served

CANCELLED_SHARE = 0.2
MEMORY_GROWTH = 1.02
DESCRIPTOR_SLACK = 2
"""Of the health checks' connections, which may be renewed meanwhile."""
CLOSE_S = 2.0
GUARD_S = 300.0
LOCAL = [("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True, slots=True)
class Work:
    """One request: what to ask, and after how many messages its client leaves (None: it stays)."""

    prompt: list[int]
    max_tokens: int
    n: int
    temperature: float
    over_http: bool
    leave_after: int | None


def draw_work(count: int, seed: int) -> Iterator[Work]:
    """`count` requests, the same for equal seeds."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(3, 4000) for _ in range(96)] for _ in range(8)]
    for number in range(count):
        shared = rng.choice(beginnings)[: rng.randrange(0, 97)]
        yield Work(
            prompt=shared + [rng.randrange(3, 4000) for _ in range(rng.randrange(1, 48))],
            max_tokens=rng.randrange(1, 33),
            n=2 if rng.random() < 0.1 else 1,
            temperature=rng.choice((0.0, 1.0)),
            over_http=number % 2 == 0,
            leave_after=rng.randrange(0, 6) if rng.random() < CANCELLED_SHARE else None,
        )


class Clients:
    """Sends work over both APIs and counts how each request ended for its client."""

    def __init__(self, server: Serving, http: httpx.AsyncClient, stub: Any) -> None:
        self._url = f"{server.http}/v1/completions"
        self._model = server.ready["info"]["model"]
        self._http = http
        self._stub = stub
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self, work: list[Work], clients: int) -> None:
        """Carry out all work, `clients` requests at a time."""
        waiting = iter(work)

        async def client() -> None:
            for item in waiting:
                await self._one(item)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def _one(self, item: Work) -> None:
        try:
            left = await (self._over_http(item) if item.over_http else self._over_grpc(item))
            self.outcomes["left" if left else "completed"] += 1
        except (httpx.HTTPError, grpc.aio.AioRpcError) as error:
            self.outcomes["failed"] += 1
            self.failures.append(f"{type(error).__name__}: {error}")

    async def _over_http(self, item: Work) -> bool:
        body = {
            "model": self._model,
            "prompt": item.prompt,
            "max_tokens": item.max_tokens,
            "n": item.n,
            "temperature": item.temperature,
            "stream": True,
        }
        seen = 0
        async with self._http.stream("POST", self._url, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if seen == item.leave_after:
                    return True
                seen += line.startswith("data: {")
        return False

    async def _over_grpc(self, item: Work) -> bool:
        sampling = text_pb2.Sampling(max_tokens=item.max_tokens, n=item.n, temperature=item.temperature)
        request = text_pb2.GenerateRequest(prompt_ids=text_pb2.TokenIds(ids=item.prompt), sampling=sampling)
        call = self._stub.Generate(request, timeout=GUARD_S)
        seen = 0
        async for _ in call:
            if seen == item.leave_after:
                call.cancel()
                return True
            seen += 1
        return False


async def soak(server: Serving, requests: int, clients: int, seed: int) -> dict[str, Any]:
    """Both halves of the load and what was found after each."""
    work = list(draw_work(requests, seed))
    began = time.monotonic()
    first = await carry_out(server, work[: requests // 2], clients)
    half_way = await resources(server)
    second = await carry_out(server, work[requests // 2 :], clients)
    end = await resources(server)
    outcomes = first.outcomes + second.outcomes
    return {
        "requests": requests,
        "clients": clients,
        "seconds": round(time.monotonic() - began, 1),
        **{name: outcomes[name] for name in ("completed", "left", "failed")},
        **findings(await settle(server)),
        "memory_growth": {role: round(end[role][0] / half_way[role][0], 4) for role in end},
        "descriptor_growth": {role: end[role][1] - half_way[role][1] for role in end},
        "failures": (first.failures + second.failures)[:5],
    }


async def carry_out(server: Serving, work: list[Work], clients: int) -> Clients:
    """Send all work over connections that are closed at the end, and wait until the server has nothing left to do."""
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with (
        httpx.AsyncClient(timeout=GUARD_S, limits=limits, trust_env=False) as http,
        grpc.aio.insecure_channel(server.grpc, options=LOCAL) as channel,
    ):
        sent = Clients(server, http, text_pb2_grpc.TextStub(channel))
        await sent.run(work, clients)
    await settle(server)
    return sent


async def settle(server: Serving) -> engine_pb2.GetStatsResponse:
    """Wait until nothing runs; raises TimeoutError when that doesn't happen."""
    async with asyncio.timeout(GUARD_S), grpc.aio.insecure_channel(server.engine, options=LOCAL) as channel:
        engine = engine_pb2_grpc.EngineStub(channel)
        while True:
            stats: engine_pb2.GetStatsResponse = await engine.GetStats(engine_pb2.GetStatsRequest())
            gauges = stats.gauges
            if not (gauges.running or gauges.waiting or gauges.pages_retiring or gauges.pages_referenced):
                return stats
            await asyncio.sleep(0.05)


def findings(stats: engine_pb2.GetStatsResponse) -> dict[str, int]:
    """The engine core's own account."""
    counters, gauges = stats.counters, stats.gauges
    return {
        "accepted": counters.sequences_accepted,
        "finished": counters.finished_stop + counters.finished_length,
        "aborted": counters.finished_abort,
        "errors": counters.finished_error,
        "rejected": counters.sequences_rejected,
        "pages_referenced": gauges.pages_referenced,
        "pages_missing": gauges.pages_total - gauges.pages_free - gauges.pages_cached,
        "prefix_hits": counters.prefix_hits,
        "preemptions": counters.preemptions,
    }


async def resources(server: Serving) -> dict[str, tuple[int, int]]:
    """Resident bytes and open descriptors of every process by role, once closed connections have gone."""
    await asyncio.sleep(CLOSE_S)
    return {role: (resident_bytes(pid), open_descriptors(pid)) for pid, role in server.roles().items()}


def broken(result: dict[str, Any]) -> list[str]:
    """What did not hold."""
    checks = {
        "a client's request failed": result["failed"] == 0,
        "the engine core failed or rejected a request": result["errors"] == result["rejected"] == 0,
        "accepted differs from finished + aborted": result["accepted"] == result["finished"] + result["aborted"],
        "no request was aborted, so nothing was tested": result["aborted"] > 0,
        "nothing came from the prefix cache": result["prefix_hits"] > 0,
        "pages are still referenced": result["pages_referenced"] == 0,
        "free + cached pages differ from the total": result["pages_missing"] == 0,
        "a process grew": max(result["memory_growth"].values()) <= MEMORY_GROWTH,
        "descriptors leak": max(result["descriptor_growth"].values()) <= DESCRIPTOR_SLACK,
    }
    return [what for what, held in checks.items() if not held]


def main() -> int:
    parser = argparse.ArgumentParser(description="Load with cancellations; everything must be given back.")
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    flags = ["--kv-cache-memory=64MiB", "--log-level=warning"]
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "serve.log"
        server = stack.enter_context(served(options.model, log, flags))
        result = asyncio.run(soak(server, options.requests, options.clients, options.seed))
    found = broken(result)
    for name, value in result.items():
        print(f"{name:<20} {value}")
    print("\n".join(f"broken: {what}" for what in found) or "all held")
    print(json.dumps({**result, "ok": not found}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
