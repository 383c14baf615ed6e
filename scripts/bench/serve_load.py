"""Ordinary load on an OpenAI-style server: clients at a fixed concurrency, or Poisson arrivals at a rate.

    python scripts/bench/serve_load.py --url URL --model NAME --concurrency 16
    python scripts/bench/serve_load.py --url URL --model NAME --rate 8 --seconds 12
    python scripts/bench/serve_load.py --null --concurrency 128          # the generator against a server of no work

Text prompts of `--input` words (a model folder of make_shape.py takes a word for a token), streamed completions of
`--output` tokens with `ignore_eos`; no two prompts alike. At a concurrency c, 5 c requests (at least 8) are measured
after c that aren't. TTFT is from sending to the first event, TPOT the rest of the answer over its tokens but one, a gap
(ITL) the time between two events of one answer. Prints a line for people, then one JSON line.

The client is a protocol over asyncio's transports that looks for the beginnings of events: a library's response
reader would cost more than the server's work per event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import numpy as np

EVENT = b'data: {"'
USAGE = b'"completion_tokens":'
NULL_TOKENS = 128


@dataclass
class Answer:
    sent: float
    events: list[float] = field(default_factory=list)
    """Arrival of each event that may hold a token."""
    tokens: int = 0
    """Of the usage that ends the answer."""
    ended: float = 0.0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent

    @property
    def tpot(self) -> float:
        return (self.events[-1] - self.events[0]) / max(1, self.tokens - 1)

    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.events)]


class Client(asyncio.Protocol):
    """One request on a connection of its own; `done` is set when the server has closed it."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._head: bytes | None = b""
        self.answer = Answer(0.0)
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.answer.sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._head is not None:
            self._head += data[:64]
            if not self._head.startswith(b"HTTP/1.1 200"[: len(self._head)]):
                self.answer.error = data.decode(errors="replace")[:500]
            if len(self._head) >= len(b"HTTP/1.1 200"):
                self._head = None
        data = self._tail + data
        self.answer.events += [now] * data.count(EVENT)
        at = data.rfind(USAGE)
        if at >= 0:
            digits = data[at + len(USAGE) :].lstrip().split(b",", 1)[0].split(b"}", 1)[0]
            if digits.isdigit():
                self.answer.tokens = int(digits)
        self._tail = data[-(len(EVENT) - 1) :]

    def connection_lost(self, error: Exception | None) -> None:
        self.answer.ended = time.perf_counter()
        self.answer.error = self.answer.error or ("" if error is None else str(error))
        if not self.done.done():
            self.done.set_result(None)


class Load:
    def __init__(self, options: argparse.Namespace, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._options = options
        self._random = random.Random(options.seed)

    async def ask(self) -> Answer:
        options = self._options
        words = " ".join(f"t{self._random.randrange(10, options.vocab)}" for _ in range(options.input))
        body = json.dumps(
            {
                "model": options.model,
                "prompt": words,
                "max_tokens": options.output,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: Client(head.encode() + body), self._host, self._port)
        await client.done
        if client.answer.tokens and len(client.answer.events) > 1:
            client.answer.events.pop()  # the one that holds the usage alone
        return client.answer

    async def concurrent(self, count: int, clients: int) -> list[Answer]:
        answers: list[Answer] = []
        left = count

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                answers.append(await self.ask())

        await asyncio.gather(*(client() for _ in range(clients)))
        return answers

    async def arriving(self, rate: float, seconds: float) -> list[Answer]:
        asked: list[asyncio.Task[Answer]] = []
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            asked.append(asyncio.create_task(self.ask()))
            await asyncio.sleep(self._random.expovariate(rate))
        return list(await asyncio.gather(*asked))


def result(options: argparse.Namespace, answers: list[Answer]) -> dict[str, Any]:
    """Raises RuntimeError when a request failed or fell short."""
    wrong = [answer for answer in answers if answer.error or answer.tokens != options.output or not answer.events]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(answers)} answers failed: {wrong[0].error or wrong[0].tokens}")
    span = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps()]
    events = sum(len(answer.events) for answer in answers)

    def ms(values: list[float], rank: float) -> float:
        return round(1e3 * float(np.percentile(values, rank)), 2)

    load = f"c{options.concurrency}" if options.concurrency else f"{options.rate:g}/s"
    ttfts, tpots = [answer.ttft for answer in answers], [answer.tpot for answer in answers]
    return {
        "label": options.label,
        "load": load,
        "requests": len(answers),
        "output_tok_s": round(sum(answer.tokens for answer in answers) / span, 1),
        "ttft_p50_ms": ms(ttfts, 50),
        "ttft_p99_ms": ms(ttfts, 99),
        "tpot_p50_ms": ms(tpots, 50),
        "tpot_p99_ms": ms(tpots, 99),
        "itl_p50_ms": ms(gaps, 50),
        "itl_p99_ms": ms(gaps, 99),
        "tokens_per_event": round(sum(answer.tokens for answer in answers) / events, 3),
        "span_s": round(span, 2),
    }


async def run(options: argparse.Namespace, url: str) -> dict[str, Any]:
    load = Load(options, url)
    if options.concurrency:
        clients = options.concurrency
        await load.concurrent(clients, clients)
        return result(options, await load.concurrent(options.requests or max(8, 5 * clients), clients))
    await load.concurrent(4, 4)
    return result(options, await load.arriving(options.rate, options.seconds))


# ------------------------------ a server of no work


async def serve_nothing() -> None:
    """Answers every request with its events at once, and says its port first."""
    event = b'data: {"choices":[{"text":" t1234","index":0}]}\n\n'
    usage = b'data: {"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % NULL_TOKENS

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        for _ in range(NULL_TOKENS):
            writer.write(event)
            await asyncio.sleep(0)
        writer.write(usage)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--model", default="")
    parser.add_argument("--label", default="")
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--requests", type=int, default=0, help="default: 5 for each client, at least 8")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second, Poisson")
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals")
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=150000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--null", action="store_true", help="measure the generator itself")
    parser.add_argument("--serve-nothing", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_nothing:
        asyncio.run(serve_nothing())
        return 0
    if bool(options.concurrency) == bool(options.rate) or bool(options.url) == options.null:
        parser.error("give one of --concurrency and --rate, and one of --url and --null")
    url, process = options.url, None
    if options.null:
        command = [sys.executable, __file__, "--serve-nothing"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
    try:
        row = asyncio.run(run(options, url))
    finally:
        if process is not None:
            process.kill()
            process.wait()
    print(
        f"{row['label']} {row['load']}: {row['output_tok_s']} tok/s, TTFT {row['ttft_p50_ms']}/{row['ttft_p99_ms']}, "
        f"TPOT {row['tpot_p50_ms']}/{row['tpot_p99_ms']}, ITL {row['itl_p50_ms']}/{row['itl_p99_ms']} ms"
    )
    print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
