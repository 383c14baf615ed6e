"""The CUDA worker against a float32 model on the CPU: every token it draws is checked where it was drawn.

    python scripts/gpu_parity.py MODEL [--overlap off|stream|green] [--steps N]

Runs the real runner on the real device with random prompts: chunked prefill, mixed steps, decode at several batch
sizes, greedy and sampled rows. For each greedy token, the reference's logit must be within BOUND of its largest,
relative to the spread of the reference's logits: bf16 may turn a near tie, nothing more. A prompt's logprobs, of chunks
that would compute their last layer for the drawn token alone, must be as near by their norm.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is run as a script

from engine_core.config import WorkerConfig
from engine_core.device.fail_stop import Unbounded
from engine_core.model_config import load_model_config
from engine_core.models.weights import load_model
from engine_core.ops.attention import CpuAttention, PagedKV
from engine_core.step import PrefillChunk, RowSampling, RowStart, StepPlan, StepResult
from engine_core.worker.runner import Runner
from engine_core.worker.worker import build_runner, device_opener

BOUND = 0.02
PAGE = 16
LONG = 700
"""Tokens of the prompt that comes in two chunks and wants logprobs."""


def worker_config(model: Path, device: str, overlap: str, load_format: str) -> WorkerConfig:
    return WorkerConfig(
        model=str(model),
        device=device,
        dtype="auto",
        load_format=load_format,
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        page_size=PAGE,
        kv_cache_memory=None,
        gpu_memory_utilization=0.5,
        async_depth=2,
        decode_overlap=overlap,
        decode_sms=None,
        threads=None,
        gpu_wait_timeout=60.0,
        crash_dir=None,
    )


class Reference:
    """Logits of any history, in float32 on the CPU."""

    def __init__(self, model: Path, load_format: str) -> None:
        self._config = load_model_config(model)
        self._model = load_model(
            model,
            self._config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            load_format=load_format,
            progress=lambda what, done, total: None,
        )
        config = self._config
        kv = PagedKV(config.num_layers, 64, PAGE, config.num_kv_heads, config.head_dim, torch.float32)
        self._attention = CpuAttention(kv, config.head_dim**-0.5)

    def logits(self, ids: list[int], last: int) -> torch.Tensor:
        """Logits behind each of the last `last` ids, [last, V]."""
        pages = np.arange(-(-len(ids) // PAGE), dtype=np.int32)[None]
        self._attention.begin(pages, np.array([0], np.int32), np.array([len(ids)], np.int32))
        hidden = self._model.forward(torch.tensor(ids), torch.arange(len(ids)), self._attention)
        return self._model.logits(hidden[-last:])


class Driver:
    """Feeds a runner as the engine would, one step at a time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._step = 0
        self._pages = 0
        self.ids: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        """Tokens of the rows' prompts."""
        self.prompt_logprobs: dict[int, float] = {}
        """By place in the only prompt that asked for them."""
        self._held: dict[int, int] = {}

    def start(self, slot: int, ids: list[int], **sampling: Any) -> RowStart:
        count = -(-len(ids) // PAGE)
        pages = np.arange(self._pages, self._pages + count, dtype="<i4")
        self._pages += count
        self._held[slot] = count
        self.ids[slot] = list(ids)
        self.prompts[slot] = len(ids)
        packed = np.array(ids, "<i4").tobytes()
        return RowStart(slot, len(ids), packed, 0, pages.tobytes(), RowSampling(**sampling))

    def run(
        self, starts: list[RowStart], decode: list[int], chunks: list[PrefillChunk], *, lane: bool = False
    ) -> StepResult:
        """One plan to its result; appends drawn tokens to the rows."""
        needy = [slot for slot in decode if len(self.ids[slot]) > self._held[slot] * PAGE]
        new = np.arange(self._pages, self._pages + len(needy), dtype="<i4")
        self._pages += len(needy)
        for slot in needy:
            self._held[slot] += 1
        self._step += 1
        slots = np.array(decode, "<i4").tobytes()
        plan = StepPlan(
            self._step, starts, np.array(needy, "<i4").tobytes(), new.tobytes(), slots, chunks, lane and bool(chunks)
        )
        self._runner.launch(plan)
        result = self._collect()
        if result.error:
            raise RuntimeError(result.error)
        for slot, token in zip(decode, np.frombuffer(result.tokens, "<i4").tolist(), strict=True):
            self.ids[slot].append(token)
        return result

    def _collect(self) -> StepResult:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for result in self._runner.collect():
                return result
            time.sleep(0.0002)
        raise RuntimeError("no result within 60 s")

    def prefill(
        self, starts: list[RowStart], decode: list[int], chunks: list[PrefillChunk], *, lane: bool
    ) -> StepResult:
        """The result with what the chunks drew: on the prefill lane that of the step in which they join."""
        result = self.run(starts, decode, chunks, lane=lane)
        while lane and not result.prefills:
            result = self.run([], decode, [])
        return result

    def take(self, result: StepResult, slots: list[int]) -> None:
        """Append what a prefill drew, and keep what it says of its prompts."""
        for prefill in result.prefills:
            if prefill.error:
                raise RuntimeError(prefill.error)
            for block in prefill.prompt_logprobs:
                described = np.frombuffer(block.logprobs, "<f4").tolist()
                self.prompt_logprobs |= {block.start + index: value for index, value in enumerate(described)}
            for slot, token in zip(slots, np.frombuffer(prefill.tokens, "<i4").tolist(), strict=True):
                self.ids[slot].append(token)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--overlap", default="off")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    config = worker_config(options.model, options.device, options.overlap, options.load_format)
    began = time.monotonic()
    device = device_opener(options.device)(config, Unbounded(), lambda what, done, total: None)
    opened_s = time.monotonic() - began

    def abort(what: str, error: BaseException | None = None) -> None:
        raise SystemExit(f"abort: {what}: {error}")

    runner = build_runner(device, config, abort, time.monotonic)
    driver = Driver(runner)
    vocabulary = device.vocab_size
    rng = random.Random(1)
    lane = options.overlap != "off"

    def prompt(length: int) -> list[int]:
        return [rng.randrange(4, vocabulary) for _ in range(length)]

    greedy = {"temperature": 0.0}
    driver.take(driver.run([driver.start(0, prompt(5), **greedy)], [], [PrefillChunk(0, 0, 5, True)]), [0])
    for _ in range(4):
        driver.run([], [0], [])
    long = driver.start(1, prompt(LONG), prompt_logprobs=0, **greedy)
    driver.take(driver.prefill([long], [0], [PrefillChunk(1, 0, 300, False)], lane=lane), [])
    driver.take(driver.prefill([], [0], [PrefillChunk(1, 300, LONG - 300, True)], lane=lane), [1])
    starts = [driver.start(slot, prompt(rng.randrange(1, 40)), **greedy) for slot in range(2, 9)]
    starts += [driver.start(slot, prompt(20), temperature=0.8, top_p=0.9, top_k=50, seed=slot) for slot in (9, 10)]
    slots = list(range(2, 11))
    chunks = [PrefillChunk(slot, 0, len(driver.ids[slot]), True) for slot in slots]
    driver.take(driver.prefill(starts, [0, 1], chunks, lane=lane), slots)
    for step in range(options.steps):
        driver.run([], list(range(11)) if step % 3 else [0, 1, 4], [])
    runner.close()
    reference = Reference(options.model, options.load_format)
    report = check(driver, reference) | {"prompt": check_prompt(driver, reference)}
    report |= {"model": options.model.name, "overlap": options.overlap, "opened_s": round(opened_s, 1)}
    report |= {"device": device.name, "pages": device.total_pages}
    print(json.dumps(report))
    return 0 if report["worst"] < BOUND and report["prompt"] < BOUND else 1


def check_prompt(driver: Driver, reference: Reference) -> float:
    """Relative error of the long prompt's logprobs, by norm; infinite unless all its tokens but the first have one."""
    if sorted(driver.prompt_logprobs) != list(range(1, LONG)):
        return float("inf")
    ids = driver.ids[1][:LONG]
    wanted = reference.logits(ids[:-1], LONG - 1).log_softmax(-1)[torch.arange(LONG - 1), torch.tensor(ids[1:])]
    got = torch.tensor([driver.prompt_logprobs[place] for place in range(1, LONG)])
    return round(float((got - wanted).norm() / wanted.norm()), 5)


def check(driver: Driver, reference: Reference) -> dict[str, Any]:
    """The largest relative shortfall of a drawn token's reference logit, over all greedy rows."""
    worst, tokens, turned = 0.0, 0, 0
    for slot in range(9):
        ids = driver.ids[slot]
        drawn = min(20 if slot == 0 else 12, len(ids) - driver.prompts[slot])
        logits = reference.logits(ids[:-1], drawn)
        for row, token in zip(logits, ids[-drawn:], strict=True):
            if slot == 0 and tokens >= 20:
                break
            shortfall = float((row.max() - row[token]) / (row.max() - row.mean()))
            worst, tokens = max(worst, shortfall), tokens + 1
            turned += shortfall > 0
    return {"tokens": tokens, "turned": turned, "worst": round(worst, 5)}


if __name__ == "__main__":
    sys.exit(main())
