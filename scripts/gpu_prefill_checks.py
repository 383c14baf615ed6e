"""Prefill attention against its float32 reference: whole and in two spans, on all SMs of the card and on some."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_core.ops.cuda import reference
from engine_core.ops.cuda.flashinfer_kernel import paged_run
from engine_core.ops.cuda.layer import Heads
from engine_core.ops.cuda.prefill import LaneSms, PagedPrefill, PrefillLimits
from scripts.gpu_kernel_cases import (
    DEVICE,
    QWEN3_4B,
    Measured,
    capture,
    make_context,
    make_kernels,
    near,
    page_lists,
    poisoned,
    random,
    sms,
)

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete


def check_prefill(cache: Path) -> Measured:
    """On all SMs and on some, with a branch and without, whole and cut in two spans of keys."""
    measured = Measured()
    for heads in (QWEN3_4B.heads, Heads(9, 3, 64)):
        context = make_context(heads, [1, 0, 2], [1, 1, 1], 4, 2048, 1)
        (kv,), pages = context.pools, page_lists(context)
        for of_lane, branch in ((sms(), _cuda.Stream()), (84, None), (8, None)):
            lane = LaneSms(sms(), of_lane)
            limits = PrefillLimits(4, 512, 512)
            kernels, run = make_kernels(cache), paged_run(heads.head_dim, cache)
            prefill = PagedPrefill(heads, limits, heads.head_dim**-0.5, lane, kernels, run, DEVICE, branch=branch)
            for bucket in (512, 256, 64):
                check_chunks(measured, heads, prefill, kv, pages, bucket, f"{of_lane} SMs")
    return measured


CHUNKS = (
    *(([513, 0], [300, 212]), ([0], [512]), ([1200, 77], [17, 1]), ([40, 7], [100, 333]), ([1700], [256])),
    *(([1500, 0, 900], [100, 20, 64]), ([15, 16, 17], [1, 2, 3]), ([1983], [64]), ([0, 1, 2], [16, 32, 16])),
)


def check_chunks(
    measured: Measured,
    heads: Heads,
    prefill: PagedPrefill,
    kv: torch.Tensor,
    pages: list[npt.NDArray[np.int32]],
    bucket: int,
    what: str,
) -> None:
    q, out = random(bucket, heads.query, heads.head_dim), poisoned(bucket, heads.query, heads.head_dim)
    prefill.plan([0], [bucket], pages[:1], bucket=bucket)
    graph = capture(partial(prefill.run, q, kv, out))
    for starts, lengths in CHUNKS:
        if sum(lengths) > bucket:
            continue
        out.fill_(torch.nan)
        prefill.plan(starts, lengths, pages[: len(starts)], bucket=bucket)
        graph.replay()
        torch.cuda.synchronize()
        wanted, first = [], 0
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            chunk = q[first : first + length].cpu()
            table = torch.from_numpy(pages[row])
            wanted.append(reference.paged_attention(chunk, kv.cpu(), table, start + length, heads.head_dim**-0.5))
            first += length
        near(measured, f"prefill/{heads.head_dim}/{what}/{bucket}/{starts}+{lengths}", out[:first], torch.cat(wanted))
        assert bool(out[first:].isnan().all()), "tokens beyond the plan were written"
        again = out.clone()
        for _ in range(5):
            graph.replay()
            assert torch.equal(out[:first], again[:first]), "replays differ: a race"
