"""The CPU default against `transformers` generate: same weights, dtype and threads, interleaved in one run.

Serves SmolLM2-135M-Instruct with default flags and measures it from outside, as streaming HTTP clients see it. In every
round one client, and then eight at once, ask for greedy completions of prompts that no cache has seen; beside them
transformers generates the same tokens in this process, one call after another and as one batched call (of prompts of
equal length, so that it pays for no padding). Prints a table, then one JSON line:

    c1_ratio          transformers' time for one completion / the server's
    c8_ratio          eight sequential calls / eight concurrent clients
    c8_batched_ratio  one batched call of eight / eight concurrent clients

each the median over the rounds; above 1 the server is faster. `same_tokens` is the share of output tokens on which the
two agree up to the first difference (float32 sums differ in order).

    python scripts/bench/cpu_vs_transformers.py [--model FOLDER] [--rounds 5] [--prompt 64] [--output 64]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is run as a script

from scripts.prepare_smollm2 import default_target, prepare
from scripts.serving import Serving, served

CLIENTS = 8
Prompts = list[list[int]]
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round."""

    served_1: float
    served_8: float
    reference_1: float
    sequential_8: float
    batched_8: float


class Client:
    """Streams completions of the server; one connection a call, as many at once as there are prompts."""

    def __init__(self, server: Serving, output: int) -> None:
        self._address = urlsplit(server.http).netloc
        self._model = server.ready["info"]["model"]
        self._output = output

    def complete(self, prompts: Prompts) -> Tokens:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self._stream, prompts))

    def _stream(self, prompt: list[int]) -> list[int]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        connection = http.client.HTTPConnection(self._address, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {response.read().decode()}")
        tokens: list[int] = []
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice["token_ids"]
        connection.close()
        return tokens


class Reference:
    """transformers on the same weights."""

    def __init__(self, model: Path, output: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._output = output

    def generate(self, prompts: Prompts) -> Tokens:
        ids = torch.tensor(prompts)
        answer: torch.Tensor = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self._output, do_sample=False, pad_token_id=0
        )
        return [[int(token) for token in row[ids.shape[1] :]] for row in answer]


def timed(call: Callable[[], Tokens]) -> tuple[float, Tokens]:
    began = time.perf_counter()
    tokens = call()
    return time.perf_counter() - began, tokens


def agreement(ours: Tokens, theirs: Tokens) -> float:
    """Share of tokens before the first difference."""
    same = 0
    for mine, other in zip(ours, theirs, strict=True):
        equal = np.array(mine) == np.array(other)
        same += len(equal) if equal.all() else int(equal.argmin())
    return same / sum(len(tokens) for tokens in theirs)


def run_round(client: Client, reference: Reference, one: Prompts, eight: Prompts) -> tuple[Round, float]:
    """One round, the server and transformers by turns; and how far their tokens agree."""
    served_1, ours = timed(lambda: client.complete(one))
    reference_1, theirs = timed(lambda: reference.generate(one))
    served_8, ours_8 = timed(lambda: client.complete(eight))
    batched_8, theirs_8 = timed(lambda: reference.generate(eight))
    sequential_8, _ = timed(lambda: [tokens for prompt in eight for tokens in reference.generate([prompt])])
    agree = agreement(ours + ours_8, theirs + theirs_8)
    return Round(served_1, served_8, reference_1, sequential_8, batched_8), agree


def report(rounds: Sequence[Round], agree: Sequence[float], output: int) -> None:
    rows = (
        ("one client", "served_1", 1),
        ("one transformers call", "reference_1", 1),
        ("eight clients", "served_8", CLIENTS),
        ("eight transformers calls, one by one", "sequential_8", CLIENTS),
        ("one transformers call of eight", "batched_8", CLIENTS),
    )
    print(f"{'':<38}{'tokens/s, median':>18}{'worst':>8}{'best':>8}")
    figures: dict[str, float] = {}
    for label, name, count in rows:
        rates = sorted(count * output / getattr(one, name) for one in rounds)
        figures[f"{name}_tok_s"] = round(statistics.median(rates), 2)
        print(f"{label:<38}{statistics.median(rates):>18.1f}{rates[0]:>8.1f}{rates[-1]:>8.1f}")

    def ratio(ours: str, theirs: str) -> float:
        return round(float(statistics.median(getattr(one, theirs) / getattr(one, ours) for one in rounds)), 3)

    result = {
        "c1_ratio": ratio("served_1", "reference_1"),
        "c8_ratio": ratio("served_8", "sequential_8"),
        "c8_batched_ratio": ratio("served_8", "batched_8"),
        "same_tokens": round(statistics.mean(agree), 4),
        "rounds": len(rounds),
        **figures,
    }
    print(json.dumps(result))


def main() -> int:
    parser = argparse.ArgumentParser(description="greenlane serve on a CPU against transformers generate.")
    parser.add_argument("--model", type=Path, help="SmolLM2 as scripts/prepare_smollm2.py makes it (default: made now)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    options = parser.parse_args()
    model = options.model or prepare(default_target())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    reference = Reference(model, options.output)
    rng = np.random.default_rng(0)

    def prompts(count: int) -> Prompts:
        drawn: Prompts = rng.integers(100, 40_000, (count, options.prompt)).tolist()
        return drawn

    with tempfile.TemporaryDirectory() as folder, served(model, Path(folder) / "serve.log") as server:
        client = Client(server, options.output)
        for side in (client.complete, reference.generate):  # warm-up
            side(prompts(1))
            side(prompts(CLIENTS))
        done = [run_round(client, reference, prompts(1), prompts(CLIENTS)) for _ in range(options.rounds)]
    report([one for one, _ in done], [agree for _, agree in done], options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
