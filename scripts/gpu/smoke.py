"""Smoke: prefills on their lane while others decode; 32 at once that may not end early; 200 at random, a third aborted.

The first request decodes throughout; the others' prompts are longer than the token budget, so each takes several
launches, all of them asynchronous. Every request must complete, every launch must have its completion, the engine
core's account must add up, and the server's log must be clean.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
from typing import Any

import grpc.aio
import httpx
from greenlane.engine.v1 import engine_pb2, engine_pb2_grpc
from greenlane.text.v1 import text_pb2_grpc

from scripts.bench.soak import LOCAL, Clients, Work, findings, settle
from scripts.gpu.options import Mode, Options, digest, parse_mode, server_flags
from scripts.serving import Serving, served

CHUNK = 256
PROMPT = 600
"""Tokens: more than two budgets."""
DECODED = 3000
"""Tokens of the request that decodes beside all the others' prefills, where the context has room for them."""
MODES = {f"green-48-{CHUNK}": (7, 13), f"stream-{CHUNK}": (4, 6)}
"""Mode → (requests, the launches that there must be at least)."""
BRACKET, BRACKET_CLIENTS = (4, 8, 16, 32, 64, 128), 32
"""Tokens of requests that mustn't end earlier, so many at once."""
RANDOM_REQUESTS = 200
ABORTED_SHARE = 0.3
CLIENTS = 24
GUARD_S = 180.0
BAD = re.compile(
    r"invalid (resource )?handle|INVALID_HANDLE|invalid event|FATAL|worker[- ]response|Xid|CUDA error|"
    r'"level": "(error|critical)"',
    re.IGNORECASE,
)


def run(options: Options) -> dict[str, Any]:
    """Both modes; what they measured by the mode's name, and what didn't hold."""
    measured: dict[str, Any] = {}
    complaints: list[str] = []
    for mode in map(parse_mode, MODES):
        requests, least_launches = MODES[mode.label]
        measured[mode.overlap] = run_mode(options, mode, requests)
        complaints += [f"{mode.overlap}: {what}" for what in broken(measured[mode.overlap], least_launches)]
    return {**measured, "broken": complaints}


def run_mode(options: Options, mode: Mode, requests: int) -> dict[str, Any]:
    log, steps = options.work / f"smoke-{mode.overlap}.log", options.work / f"smoke-{mode.overlap}.steps.jsonl"
    steps.unlink(missing_ok=True)
    flags = server_flags(options, mode, f"--step-log={steps}")
    earlier = kernel_complaints()
    with served(options.model(), log, flags) as server:
        measured = asyncio.run(load(options, server, requests))
    return measured | {
        "flags": flags,
        "start_s": round(server.start_s, 1),
        "log_complaints": BAD.findall(log.read_text(errors="replace")),
        "kernel_complaints": kernel_complaints()[len(earlier) :],
        "step_log": digest(steps),
    }


async def load(options: Options, server: Serving, requests: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=GUARD_S, limits=limits, trust_env=False) as http,
        grpc.aio.insecure_channel(server.grpc, options=LOCAL) as text,
        grpc.aio.insecure_channel(server.engine, options=LOCAL) as channel,
    ):
        engine = engine_pb2_grpc.EngineStub(channel)
        measured = await overlapping(options, server, http, engine, requests)
        bracket = {str(tokens): await ended_by_length(options, server, http, tokens) for tokens in BRACKET}
        clients = Clients(server, http, text_pb2_grpc.TextStub(text))
        await clients.run(draw(options), CLIENTS)
        stats = await settle(server)
        outcomes = {name: clients.outcomes[name] for name in ("completed", "left", "failed")}
        account: dict[str, Any] = {"requests": RANDOM_REQUESTS, **outcomes, **findings(stats)}
        account["failures"] = clients.failures[:5]
        account["unmatched_launches"] = stats.counters.prefill_launches - stats.counters.prefill_completions
    return {**measured, "ignore_eos": bracket, "random": account}


# ------------------------------ seven at once


async def overlapping(
    options: Options, server: Serving, http: httpx.AsyncClient, engine: Any, requests: int
) -> dict[str, Any]:
    """One long decoder, then the others beside it; launches and completions since it began to decode."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, options.vocabulary) for _ in range(length)]

    decoder = Stream(http, server, prompt(16), min(DECODED, options.context - PROMPT))
    running = asyncio.create_task(decoder.run())
    await asyncio.wait_for(decoder.first.wait(), GUARD_S)
    before = await counters(engine)
    others = [Stream(http, server, prompt(PROMPT), 64) for _ in range(requests - 1)]
    tasks = [asyncio.create_task(other.run()) for other in others]
    await asyncio.wait_for(asyncio.gather(*(other.first.wait() for other in others)), GUARD_S)
    beside = not running.done()
    await asyncio.gather(running, *tasks)
    after = await counters(engine)
    streams = [decoder, *others]
    return {
        "requests": requests,
        "completed": sum(stream.complete for stream in streams),
        "launches": after.prefill_launches - before.prefill_launches,
        "completions": after.prefill_completions - before.prefill_completions,
        "decoded_throughout": beside,
    }


async def ended_by_length(options: Options, server: Serving, http: httpx.AsyncClient, tokens: int) -> int:
    """How many of BRACKET_CLIENTS at once got all their tokens with ignore_eos (rule S9)."""
    rng = random.Random(tokens)
    prompts = [
        [rng.randrange(10, options.vocabulary) for _ in range(rng.randrange(1, 80))] for _ in range(BRACKET_CLIENTS)
    ]
    streams = [Stream(http, server, prompt, tokens) for prompt in prompts]
    await asyncio.gather(*(stream.run() for stream in streams))
    return sum(stream.complete for stream in streams)


class Stream:
    """One streamed completion over HTTP. `complete`: it ended by length, with every token."""

    def __init__(self, http: httpx.AsyncClient, server: Serving, prompt: list[int], tokens: int) -> None:
        self._http = http
        self._url = f"{server.http}/v1/completions"
        self._tokens = tokens
        self._body = {
            "model": server.ready["info"]["model"],
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.first = asyncio.Event()
        self.complete = False

    async def run(self) -> None:
        reasons: list[str] = []
        generated = 0
        async with self._http.stream("POST", self._url, json=self._body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.first.set()
                    event = json.loads(line.removeprefix("data: "))
                    reasons += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
                    generated = (event.get("usage") or {}).get("completion_tokens", generated)
        self.complete = reasons == ["length"] and generated == self._tokens


async def counters(engine: Any) -> engine_pb2.Counters:
    stats: engine_pb2.GetStatsResponse = await engine.GetStats(engine_pb2.GetStatsRequest(), timeout=GUARD_S)
    return stats.counters


# ------------------------------ two hundred, some aborted


def draw(options: Options) -> list[Work]:
    """Short and long prompts, greedy and sampled, over both APIs; some clients leave early."""
    rng = random.Random(1)
    return [
        Work(
            prompt=[rng.randrange(10, options.vocabulary) for _ in range(rng.choice((8, 100, 700, 1400)))],
            max_tokens=rng.randrange(1, 400),
            n=1,
            temperature=rng.choice((0.0, 1.0)),
            over_http=number % 2 == 0,
            leave_after=rng.randrange(0, 5) if rng.random() < ABORTED_SHARE else None,
        )
        for number in range(RANDOM_REQUESTS)
    ]


# ------------------------------ what didn't hold


def broken(measured: dict[str, Any], least_launches: int) -> list[str]:
    checks = {
        "a request didn't complete": measured["completed"] == measured["requests"],
        "launches and completions differ": measured["launches"] == measured["completions"],
        f"fewer than {least_launches} launches": measured["launches"] >= least_launches,
        "the first request ended early, so launches weren't beside decode": measured["decoded_throughout"],
        "a request with ignore_eos ended early": set(measured["ignore_eos"].values()) == {BRACKET_CLIENTS},
        "the server's log complains": not measured["log_complaints"],
        "the kernel's log complains": not measured["kernel_complaints"],
        **account_checks(measured["random"]),
    }
    return [what for what, held in checks.items() if not held]


def account_checks(account: dict[str, Any]) -> dict[str, bool]:
    return {
        "a client's request failed": account["failed"] == 0,
        "the engine core failed or rejected a request": account["errors"] == account["rejected"] == 0,
        "accepted differs from finished + aborted": account["accepted"] == account["finished"] + account["aborted"],
        "no request was aborted": account["aborted"] > 0,
        "a launch has no completion": account["unmatched_launches"] == 0,
        "pages are still referenced": account["pages_referenced"] == 0,
        "free + cached pages differ from the total": account["pages_missing"] == 0,
    }


def kernel_complaints() -> list[str]:
    """Xid lines of the kernel's log so far; a log that can't be read shows none."""
    found = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", check=False)
    return [line for line in found.stdout.splitlines() if "Xid" in line]
