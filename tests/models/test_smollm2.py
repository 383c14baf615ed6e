"""SmolLM2 served on a CPU says what transformers says, whatever the batch, the cache, the depth and the chunks."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from scripts.prepare_smollm2 import default_target, prepare
from scripts.serving import Serving, served
from tests.models.greedy import PROMPTS, other_choices

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
TOKENS = 64
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare(default_target())


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


class Reference:
    """Checks outputs against transformers; differences are allowed at ties only, and printed."""

    def __init__(self, folder: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(folder)
        self._known: set[tuple[int, ...]] = set()

    def check(self, prompt: list[int], output: list[int], where: str) -> None:
        assert len(output) == TOKENS
        key = (*prompt, -1, *output)
        if key not in self._known:
            steps = other_choices(self._model, prompt, output)
            for step in steps:
                print(f"{where}: {step}")
            assert all(step.tie for step in steps), f"{where}: {steps}"
            self._known.add(key)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def complete(server: Serving, prompt: list[int]) -> list[int]:
    """Greedy output ids of one request over HTTP."""
    body = {
        "model": server.ready["info"]["model"],
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with OPENER.open(request, timeout=900) as response:
        ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return ids


def all_at_once(server: Serving, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt), prompts))


def test_alone_and_batched_cold_and_warm(
    folder: Path, prompts: list[list[int]], reference: Reference, tmp_path: Path
) -> None:
    """Red when a token depends on the rows beside it or on prompt pages taken from the cache."""
    with served(folder, tmp_path / "serve.log") as server:
        for prompt in prompts:
            reference.check(prompt, complete(server, prompt), "alone, cold cache")
        for prompt, output in zip(prompts, all_at_once(server, prompts), strict=True):
            reference.check(prompt, output, "batched, warm cache")
        for prompt in prompts[:4]:
            reference.check(prompt, complete(server, prompt), "alone, warm cache")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk", [16, 512])
def test_every_depth_and_chunk(
    depth: int, chunk: int, folder: Path, prompts: list[list[int]], reference: Reference, tmp_path: Path
) -> None:
    """Red when token feedback at some depth, or a prompt cut into chunks, changes a token."""
    flags = [f"--async-depth={depth}", f"--max-num-batched-tokens={chunk}", "--max-num-seqs=16"]
    with served(folder, tmp_path / "serve.log", flags) as server:
        for prompt, output in zip(prompts, all_at_once(server, prompts), strict=True):
            reference.check(prompt, output, f"depth {depth}, chunks of {chunk}, cold cache")
