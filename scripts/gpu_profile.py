"""Where a CUDA worker's step goes: each kernel class, copies, gaps on the GPU, and the host's share.

    python scripts/gpu_profile.py [--shape 4b] [--cases decode:16 prefill:2048 mixed:16+240 lane:16+4096 …] [--out FILE]

Drives the real runner over the real device, as deep as the engine would, with random weights and rows of CONTEXT
tokens. Every case is timed without a profiler first (wall clock per step, host time of a launch and of a collect),
then profiled over a few steps. `lane` is the time of decode steps beside one batch on the prefill lane; `eager` is
`prefill` without its graph, all else equal.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is run as a script

from engine_core.config import WorkerConfig
from engine_core.device.cuda.compute import CudaCompute, LaneWork
from engine_core.device.fail_stop import Unbounded
from engine_core.step import MOST_PRIMARY_TOKENS, PrefillChunk, RowSampling, RowStart, StepPlan, StepResult
from engine_core.worker.runner import Runner
from engine_core.worker.worker import build_runner, device_opener
from scripts.bench import make_shape
from scripts.gpu_kernels import machine

CASES = [
    *("decode:1", "decode:16", "decode:64", "prefill:1024", "prefill:2048", "eager:1024", "eager:2048"),
    *("mixed:16+240", "mixed:64+192", "mixed:64+448", "lane:16+4096", "lane:64+4096"),
]
PAGE, CONTEXT, ROWS = 16, 1024, 64
TIMED, PROFILED = 60, 6
CLASSES = {
    "prefill attention": r"Prefill|prefill|fmha|flash",
    "decode attention": r"decode_attention|plan_splits",
    "skinny linear": r"skinny",
    "stream-K": r"streamk",
    "matmul": r"nvjet|gemm|cublas|cutlass|splitK|sm90_",
    "norm": r"norm",
    "rope + KV write": r"rope_and_store",
    "silu * mul": r"silu_mul",
    "sampling": r"edit_logits|score_logits|list_likely|pick_token",
    "copy": r"[Mm]emcpy|[Mm]emset",
}


@dataclass
class Feed:
    """Plans as the engine makes them, up to two in flight."""

    runner: Runner
    depth: int
    step: int = 0
    pages: int = 0
    launch_us: list[float] = field(default_factory=list)
    collect_us: list[float] = field(default_factory=list)
    flying: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)

    def start(self, slot: int, length: int) -> RowStart:
        """A row with pages for its prompt; slots are used once a case."""
        count = -(-length // PAGE)
        pages = np.arange(self.pages, self.pages + count, dtype="<i4")
        self.pages += count
        self.held[slot], self.lengths[slot] = count, length
        ids = np.random.default_rng(slot).integers(10, 4000, length, dtype="<i4")
        return RowStart(slot, length, ids.tobytes(), 0, pages.tobytes(), RowSampling(temperature=0.0))

    def launch(
        self, decode: list[int], starts: list[RowStart], chunks: list[PrefillChunk], *, lane: bool = False
    ) -> list[StepResult]:
        """Enqueue a step, then wait until fewer than `depth` are in flight."""
        needy = [slot for slot in decode if self.lengths[slot] >= self.held[slot] * PAGE]
        new = np.arange(self.pages, self.pages + len(needy), dtype="<i4")
        self.pages += len(needy)
        for slot in needy:
            self.held[slot] += 1
        for slot in decode:
            self.lengths[slot] += 1
        self.step += 1
        grown, pages, slots = (np.array(values, "<i4").tobytes() for values in (needy, new, decode))
        plan = StepPlan(self.step, starts, grown, pages, slots, chunks, lane)
        began = time.perf_counter()
        self.runner.launch(plan)
        self.launch_us.append(1e6 * (time.perf_counter() - began))
        self.flying += 1
        return self.collect(self.depth - 1)

    def collect(self, left: int) -> list[StepResult]:
        results: list[StepResult] = []
        while self.flying > left:
            began = time.perf_counter()
            found = self.runner.collect()
            if found:
                self.collect_us.append(1e6 * (time.perf_counter() - began))
            for result in found:
                if result.error:
                    raise RuntimeError(result.error)
                self.flying -= 1
                results.append(result)
        return results

    def prefill(self, slots: list[int], length: int, budget: int) -> None:
        """Rows from nothing, several a step."""
        for first in range(0, len(slots), max(1, budget // length)):
            some = slots[first : first + max(1, budget // length)]
            starts = [self.start(slot, length) for slot in some]
            self.launch([], starts, [PrefillChunk(slot, 0, length, True) for slot in some])
        self.collect(0)


def run(case: str, feed: Feed, budget: int) -> Callable[[int], None]:
    """Prepare a case; what is returned runs it for so many steps."""
    kind, _, numbers = case.partition(":")
    rows, _, tokens = numbers.rpartition("+") if kind != "decode" else (numbers, "", "")
    decode = list(range(int(rows or 0)))
    feed.pages = 0
    if decode:
        feed.prefill(decode, CONTEXT, min(budget, MOST_PRIMARY_TOKENS))
    length = int(tokens or 0)
    spare = ROWS

    def steps(count: int) -> None:
        nonlocal spare
        for _ in range(count):
            if kind == "decode":
                feed.launch(decode, [], [])
                continue
            kept = feed.pages
            spare = ROWS + (spare - ROWS + 1) % 4
            starts, chunk = [feed.start(spare, length)], [PrefillChunk(spare, 0, length, True)]
            if kind != "lane":
                feed.launch(decode, starts, chunk)
            else:
                results = feed.launch(decode, starts, chunk, lane=True)
                while not any(result.prefills for result in results):
                    results = feed.launch(decode, [], [])
            if not decode:
                feed.pages = kept
        feed.collect(0)

    return steps


@contextmanager
def without_graphs(work: LaneWork) -> Iterator[None]:
    """The primary lane's forwards with chunks run eagerly: what their graphs were captured from is kept by them."""
    graphs = dict(work.ragged)
    work.ragged.update({shape: cast(Any, replay).kept for shape, replay in graphs.items()})
    yield
    work.ragged.update(graphs)


def measure(case: str, feed: Feed, budget: int) -> dict[str, Any]:
    steps = run(case, feed, budget)
    steps(4)
    feed.launch_us.clear()
    feed.collect_us.clear()
    count = TIMED if case.startswith("decode") else 12
    first, began = feed.step, time.perf_counter()
    steps(count)
    wall_us = 1e6 * (time.perf_counter() - began)
    launched = feed.step - first
    out = {
        "case": case,
        "wall_us": round(wall_us / launched, 1),
        "wall_us_chunk": round(wall_us / count, 1),
        "launch_us": round(statistics.median(feed.launch_us), 1),
        "launch_max_us": round(max(feed.launch_us), 1),
        "collect_us": round(statistics.median(feed.collect_us), 1),
    }
    count, first = (PROFILED if case.startswith("decode") else 3), feed.step
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps(count)
        torch.cuda.synchronize()
    return {**out, **summary(profiler, feed.step - first)}


def host_profile(steps: Callable[[int], None]) -> str:
    """The 30 most expensive functions of 100 steps, by their own time."""
    steps(20)
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(steps, 100)
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(30)
    return text.getvalue()


def summary(profiler: Any, steps: int) -> dict[str, Any]:
    """GPU microseconds a step by class, and how much of the span from first to last kernel none was running."""
    total: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    spans = []
    for name, start, length in kernels(profiler):
        kind = next((kind for kind, pattern in CLASSES.items() if re.search(pattern, name)), "other")
        total[kind] += length
        names[name] += length
        spans.append((start, start + length))
    busy, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    span = end - min(start for start, _ in spans) if spans else 0.0
    return {
        "gpu_us": {kind: round(us / steps, 1) for kind, us in sorted(total.items(), key=lambda pair: -pair[1])},
        "busy_us": round(busy / steps, 1),
        "idle_us": round((span - busy) / steps, 1),
        "top": {name[:60]: round(us / steps, 1) for name, us in sorted(names.items(), key=lambda pair: -pair[1])[:8]},
    }


def kernels(profiler: Any) -> Iterator[tuple[str, float, float]]:
    """(name, start us, length us) of everything that ran on the GPU."""
    for event in profiler.events():
        if event.device_type.name == "CUDA" and not event.name.startswith("ProfilerStep"):
            yield event.name, event.time_range.start, event.time_range.elapsed_us()


def configuration(options: argparse.Namespace) -> WorkerConfig:
    """Of a worker whose random weights have the asked shape."""
    folder = make_shape.write(options.shape, Path("/tmp/greenlane-profile") / options.shape)
    return WorkerConfig(
        model=str(folder),
        device="cuda",
        dtype="auto",
        load_format="dummy",
        max_model_len=16384,
        max_num_seqs=128,
        max_num_batched_tokens=options.budget,
        page_size=PAGE,
        kv_cache_memory=None,
        gpu_memory_utilization=0.8,
        async_depth=2,
        decode_overlap=options.overlap,
        decode_sms=options.decode_sms if options.overlap in ("green", "auto") else None,
        threads=None,
        gpu_wait_timeout=60.0,
        crash_dir=None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--overlap", default="auto", help="auto has the graphs of every case")
    parser.add_argument("--decode-sms", type=int, default=64)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--host", action="store_true", help="first, which Python calls a decode step of 16 rows makes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    config = configuration(options)
    stages: dict[str, float] = {}

    def progress(what: str, done: int, total: int) -> None:
        stages[what] = time.perf_counter()

    began = time.perf_counter()
    device = device_opener("cuda")(config, Unbounded(), progress)
    opened = time.perf_counter() - began
    ends = {what: round(at - began, 1) for what, at in stages.items()}
    print(f"opened in {opened:.1f} s; ends of stages: {ends}", flush=True)
    print(f"times: {device.times}", flush=True)

    def abort(what: str, error: BaseException | None = None) -> None:
        raise SystemExit(f"abort: {what}: {error}")

    feed = Feed(build_runner(device, config, abort, time.monotonic), config.async_depth)
    report: dict[str, Any] = {"machine": machine(options.commit), "opened_s": opened, "stages": ends, "cases": []}
    if options.host:
        for case in ("decode:16", "prefill:1024"):
            print(host_profile(run(case, feed, options.budget)))
    primary = cast(CudaCompute, device.compute).primary
    for case in options.cases:
        with without_graphs(primary) if case.startswith("eager") else nullcontext():
            report["cases"].append(measured := measure(case, feed, options.budget))
        print(json.dumps(measured), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
