"""Structured output on the GPU: what is drawn fits, and rows without a grammar keep their pace beside rows with one.

A few streams decode freely while neighbours come and go: first without grammars, then with, then without again. Beside
that, and not judged: without grammars but in the constrained ones' ways to draw, since logprobs cost all rows. Every
constrained answer is parsed or matched. The model has a real shape and random weights, and a vocabulary of byte pairs
and triples as large as the shape's, so that masks are as long as in production and nothing fits by chance.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from scripts.bench import make_shape
from scripts.gpu.options import Mode, Options, parse_mode, server_flags
from scripts.gpu.smoke import BAD
from scripts.serving import Serving, served

MODES = ("off", "green-48")
SEQS = 32
STREAMS, NEIGHBOURS = 4, 6
TOKENS = 500
"""Of each free stream."""
NEIGHBOUR_TOKENS = 40
PACE = 1.1
"""How many times as long as beside other neighbours the median ITL may be beside constrained ones."""
GUARD_S = 120.0
EOS = "<|im_end|>"
Kind = tuple[str, dict[str, Any], Callable[[str], bool]]
"""Name, fields of the request, whether an answer fits."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "moods": {"type": "array", "items": {"enum": ["gay", "grave"]}, "minItems": 1, "maxItems": 3},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "moods", "married"],
    "additionalProperties": False,
}
REGEX = r"[A-Z]{3}-[0-9]{4}( [a-z]{2,6}){2}"
CHOICES = ["zebra", "quagga", "a striped horse"]


def run(options: Options) -> dict[str, Any]:
    """All modes by label, and what didn't hold."""
    folder = write_model(options)
    measured = {label: run_mode(options, folder, parse_mode(label)) for label in MODES}
    complaints = [f"{label}: {what}" for label in MODES for what in broken(measured[label], timed=options.on_gpu)]
    return {**measured, "broken": complaints}


def run_mode(options: Options, folder: Path, mode: Mode) -> dict[str, Any]:
    log = options.work / f"masks-{mode.label}.log"
    flags = server_flags(options, mode, f"--max-num-seqs={SEQS}", "--no-enable-prefix-caching")
    with served(folder, log, flags) as server:
        measured = asyncio.run(load(options, server))
    complaints = BAD.findall(log.read_text(errors="replace"))
    return {"flags": flags, "start_s": round(server.start_s, 1), **measured, "log_complaints": complaints}


# ------------------------------ the model


def write_model(options: Options) -> Path:
    """The shape with a tokenizer that llguidance can read; the tiny model has one."""
    if options.shape == "tiny":
        return options.model()
    folder = options.work / f"qwen3-{options.shape}-bytes"
    if not (folder / "tokenizer.json").exists():
        make_shape.write(options.shape, folder)
        byte_tokenizer(make_shape.VOCABULARY).save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    return folder


def byte_tokenizer(size: int) -> Tokenizer:
    """Every byte, then pairs and triples of ASCII, most of letters, up to `size`; eos stands where the shape has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = [*sorted(map(chr, range(33, 127)), key=lambda char: (not char.isalpha(), char)), "Ġ"]
    every = [(first, second) for first in text for second in text]
    pairs = sorted(every, key=lambda pair: not "".join(pair).isalpha())
    triples = ((first + second, third) for first, second in pairs for third in text)
    merges = list(itertools.islice(itertools.chain(pairs, triples), size - len(alphabet) - 1))
    tokens = [*alphabet, *(first + second for first, second in merges)]
    tokens.insert(make_shape.EOS, EOS)
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


# ------------------------------ the load


class Load:
    def __init__(self, options: Options, server: Serving, http: httpx.AsyncClient) -> None:
        self._vocabulary = options.vocabulary
        self._url = f"{server.http}/v1/completions"
        self._model = server.ready["info"]["model"]
        self._http = http
        self._random = random.Random(5)
        self.answers: Counter[str] = Counter()
        self.misfits: list[str] = []

    def _body(self, **fields: Any) -> dict[str, Any]:
        prompt = [self._random.randrange(10, self._vocabulary) for _ in range(16)]
        return {"model": self._model, "prompt": prompt, "seed": self._random.randrange(1 << 30), **fields}

    async def free_stream(self) -> list[float]:
        """The times, in seconds, at which its tokens came."""
        body = self._body(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, stream=True)
        times = []
        async with self._http.stream("POST", self._url, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        return times

    async def free_neighbour(self) -> None:
        while True:
            body = self._body(max_tokens=NEIGHBOUR_TOKENS, temperature=1.0, ignore_eos=True)
            (await self._http.post(self._url, json=body)).raise_for_status()

    async def unconstrained_neighbour(self, turn: int) -> None:
        """The ways to draw of a constrained one."""
        for number in itertools.count(turn):
            body = self._body(max_tokens=NEIGHBOUR_TOKENS, ignore_eos=True, **way(number))
            (await self._http.post(self._url, json=body)).raise_for_status()

    async def constrained_neighbour(self, turn: int) -> None:
        """Kinds and ways to draw in turn."""
        for number in itertools.count(turn):
            await self.constrained(KINDS[number % len(KINDS)], way(number))

    async def constrained(self, kind: Kind, way: dict[str, Any]) -> None:
        name, grammar, fits = kind
        answer = await self._http.post(self._url, json=self._body(max_tokens=300, **grammar, **way))
        answer.raise_for_status()
        (choice,) = answer.json()["choices"]
        self.answers[name] += 1
        if choice["finish_reason"] != "stop" or not fits(choice["text"]):
            self.misfits.append(f"{name} {way}: {choice['finish_reason']} {choice['text']!r}")


def fits_schema(text: str) -> bool:
    try:
        person = json.loads(text)
        return (
            list(person) == SCHEMA["required"]
            and isinstance(person["name"], str)
            and len(person["name"]) <= 8
            and type(person["age"]) is int
            and 0 <= person["age"] <= 150
            and 1 <= len(person["moods"]) <= 3
            and set(person["moods"]) <= {"gay", "grave"}
            and isinstance(person["married"], bool)
        )
    except (ValueError, TypeError, KeyError):
        return False


KINDS: tuple[Kind, ...] = (
    (
        "json_schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
        fits_schema,
    ),
    ("regex", {"structured_outputs": {"regex": REGEX}}, lambda text: re.fullmatch(REGEX, text) is not None),
    ("choice", {"structured_outputs": {"choice": CHOICES}}, lambda text: text in CHOICES),
)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.7, "frequency_penalty": 0.3, "logit_bias": {"40": 5.0}},
)


def way(number: int) -> dict[str, Any]:
    """Each way for as many requests as there are kinds."""
    return WAYS[number // len(KINDS) % len(WAYS)]


async def load(options: Options, server: Serving) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=GUARD_S, limits=limits, trust_env=False) as http:
        work = Load(options, server, http)
        for kind, way in itertools.product(KINDS, WAYS):
            await work.constrained(kind, way)
        itl = {
            "free_before": await pace(work, [work.free_neighbour for _ in range(NEIGHBOURS)]),
            "constrained": await pace(work, [partial(work.constrained_neighbour, n) for n in range(NEIGHBOURS)]),
            "free_after": await pace(work, [work.free_neighbour for _ in range(NEIGHBOURS)]),
            "free_all_ways": await pace(work, [partial(work.unconstrained_neighbour, n) for n in range(NEIGHBOURS)]),
        }
    return {"itl_ms_beside": itl, "answers": dict(work.answers), "misfits": work.misfits[:5]}


async def pace(work: Load, neighbours: list[Callable[[], Any]]) -> dict[str, float]:
    """ITL of the free streams, in ms, while these neighbours come and go."""
    beside = [asyncio.ensure_future(neighbour()) for neighbour in neighbours]
    try:
        streams = await asyncio.gather(*(work.free_stream() for _ in range(STREAMS)))
        failed = [task for task in beside if task.done()]
        for task in failed:
            task.result()
    finally:
        for task in beside:
            task.cancel()
        for task in beside:
            with suppress(asyncio.CancelledError, httpx.HTTPError):
                await task
    gaps = [1e3 * (after - before) for times in streams for before, after in itertools.pairwise(times)]
    cuts = statistics.quantiles(gaps, n=100)
    return {"p50": round(statistics.median(gaps), 3), "p90": round(cuts[89], 3), "p99": round(cuts[98], 3)}


# ------------------------------ what didn't hold


def broken(measured: dict[str, Any], *, timed: bool) -> list[str]:
    """`timed`: the pace is a GPU's, so that it must hold."""
    itl = measured["itl_ms_beside"]
    free = max(itl["free_before"]["p50"], itl["free_after"]["p50"])
    checks = {
        "a constrained answer doesn't fit": not measured["misfits"],
        "a kind of constraint had no answer": all(measured["answers"].get(kind, 0) > 0 for kind, *_ in KINDS),
        f"beside constrained rows the median ITL is over {PACE} times that beside others": (
            not timed or itl["constrained"]["p50"] <= PACE * free
        ),
        "the server's log complains": not measured["log_complaints"],
    }
    return [what for what, held in checks.items() if not held]
