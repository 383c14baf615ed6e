"""Decode pace under prefill: streaming decoders run while cold prompts arrive at a fixed rate.

    python scripts/bench/itl_mix.py --url URL --model NAME --decoders 16 --inject-len 4096 --qps 4 --n 40

Works on any OpenAI-style server whose /v1/completions takes token ids and `ignore_eos`, and streams usage. A gap is the
time between two events of one stream; tokens are counted from the usage in the events, so that a server can't look
faster by sending several at once. Decoders must outlast the injection: raise --out if `decoders_alive` is below
--decoders. Prints a line for people, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import numpy as np

FIRST_EVENTS = 50
"""Every decoder has sent so many events before anything is measured."""
DECODER_PROMPT = 128


@dataclass
class Load:
    url: str
    model: str
    vocabulary: int
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def body(self, prompt: int, output: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": [self.random.randrange(10, self.vocabulary) for _ in range(prompt)],
            "max_tokens": output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


Events = list[tuple[float, int]]
"""(arrival, tokens in the event)."""


async def stream(http: aiohttp.ClientSession, load: Load, prompt: int, output: int, events: Events) -> float:
    """Stream one completion into `events`; returns when it was sent."""
    body = load.body(prompt, output)
    sent, seen = time.perf_counter(), 0
    async with http.post(load.url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: ") or b"[DONE]" in line:
                continue
            event = json.loads(line[6:])
            if not event.get("choices"):
                continue
            tokens = (event.get("usage") or {}).get("completion_tokens", seen + 1)
            if tokens > seen:
                events.append((time.perf_counter(), tokens - seen))
                seen = tokens
    return sent


async def run(options: argparse.Namespace) -> dict[str, Any]:
    load = Load(options.url, options.model, options.vocab)
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        rows: list[Events] = [[] for _ in range(options.decoders)]
        decoders = [asyncio.create_task(stream(http, load, DECODER_PROMPT, options.out, row)) for row in rows]
        while min(len(row) for row in rows) < FIRST_EVENTS:
            await asyncio.sleep(0.01)
            for decoder in decoders:
                if decoder.done():
                    decoder.result()
        began = time.perf_counter()
        ttft: list[float] = []

        async def inject() -> None:
            events: Events = []
            sent = await stream(http, load, options.inject_len, 1, events)
            ttft.append((events[0][0] - sent) * 1e3)

        if options.qps > 0:
            injected = []
            for _ in range(options.n):
                injected.append(asyncio.create_task(inject()))
                await asyncio.sleep(1 / options.qps)
            await asyncio.gather(*injected)
        else:
            await asyncio.sleep(options.seconds)
        ended = time.perf_counter()
        alive = sum(not decoder.done() for decoder in decoders)
        for decoder in decoders:
            decoder.cancel()
        await asyncio.gather(*decoders, return_exceptions=True)
    return result(options, rows, ttft, began, ended, alive)


def result(
    options: argparse.Namespace, rows: list[Events], ttft: list[float], began: float, ended: float, alive: int
) -> dict[str, Any]:
    pairs = [pair for row in rows for pair in pairwise(row)]
    gaps = [(after[0] - before[0]) * 1e3 for before, after in pairs if before[0] >= began and after[0] <= ended]
    inside = [tokens for row in rows for at, tokens in row if began <= at <= ended]

    def percentile(values: list[float], rank: float) -> float | None:
        return round(float(np.percentile(values, rank)), 2) if values else None

    return {
        "label": options.label,
        "decoders": options.decoders,
        "inject_len": options.inject_len,
        "qps": options.qps,
        "n": len(ttft),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p90_ms": percentile(gaps, 90),
        "itl_p99_ms": percentile(gaps, 99),
        "itl_max_ms": percentile(gaps, 100),
        "decode_tok_s": round(sum(inside) / (ended - began), 1),
        "tokens_per_event": round(sum(inside) / max(1, len(inside)), 3),
        "ttft_p50_ms": percentile(ttft, 50),
        "ttft_p99_ms": percentile(ttft, 99),
        "span_s": round(ended - began, 2),
        "decoders_alive": alive,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode pace while prompts arrive.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--label", default="")
    parser.add_argument("--decoders", type=int, default=16)
    parser.add_argument("--out", type=int, default=8000, help="tokens of each decoder")
    parser.add_argument("--inject-len", type=int, default=4096)
    parser.add_argument("--qps", type=float, default=2.0, help="injected prompts a second; 0: none")
    parser.add_argument("--n", type=int, default=20, help="prompts injected")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time without injection")
    parser.add_argument("--vocab", type=int, default=150000)
    row = asyncio.run(run(parser.parse_args()))
    print(
        f"{row['label']}: {row['decoders']} decoders, {row['inject_len']} at {row['qps']}/s: "
        f"ITL p50 {row['itl_p50_ms']} p99 {row['itl_p99_ms']} max {row['itl_max_ms']} ms, "
        f"{row['decode_tok_s']} tok/s, TTFT p50 {row['ttft_p50_ms']} ms"
    )
    print(json.dumps(row))


if __name__ == "__main__":
    main()
