"""How fast both lanes of a split multiply, by how the algorithms of their matrix products were chosen."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from engine_core.device.cuda.driver import CudaTable
from engine_core.device.cuda.product_times import LOAD_LAYERS, ProductTimes
from engine_core.device.cuda.tuning import Neighbour, Wanted, tune
from engine_core.device.driver import Driver
from engine_core.device.fail_stop import Unbounded
from engine_core.device.green import split
from engine_core.ops.cuda.cublaslt import CublasLt
from engine_core.ops.cuda.decoder import Weights
from engine_core.ops.cuda.matmul import Choices, LaneMatmul
from engine_core.ops.cuda.streamk import StreamKLinear
from scripts.gpu_kernel_cases import DEVICE, QWEN3_4B, make_kernels, random, sms

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete
LAYERS, ROWS = 6, 64
SPLITS = ((48, 2048), (48, 8192), (72, 8192))
"""SMs for decode, tokens of the prefill on the others."""


def time_lanes(cache: Path) -> Iterable[dict[str, float | int | str]]:
    """A 4B layer's four products of a prefill beside those of 64 decode rows, which are streamed: by the library's
    favourites, the fastest alone on the lane, and those that both lanes get on with best."""
    torch.zeros(1, device=DEVICE)  # makes the context
    library, driver = CublasLt(sms()), Driver(CudaTable(0), Unbounded())
    kernels, weights = make_kernels(cache), []
    for size in QWEN3_4B.products:
        matrices = [random(*size, scale=0.02) for _ in range(LAYERS)]
        weights.append(Weights(matrices, streamed=[StreamKLinear(matrix, kernels) for matrix in matrices]))
    primary = _cuda.Stream()
    for decode_sms, tokens in SPLITS:
        partition = split(driver, decode_sms)
        streams = [_cuda.ExternalStream(int(lane.stream)) for lane in (partition.decode, partition.prefill)]
        for chosen in ("favourites", "fastest alone", "both lanes"):
            with tempfile.TemporaryDirectory() as folder:
                choices = Choices(Path(folder) / "choices.json")
                decode, prefill = (LaneMatmul(library, choices, count) for count in (decode_sms, partition.prefill_sms))
            decoding = Neighbour(decode, streams[0], weights, ROWS, decodes=True)
            prefilling = Neighbour(prefill, streams[1], weights, tokens, decodes=False)
            if chosen != "favourites":
                _choose(decoding, prefilling, ProductTimes(primary), both=chosen == "both lanes")
            prefill_us, decode_us = _layer_us(decoding, prefilling, ProductTimes(primary))
            yield {
                "kernel": f"{tokens} tokens beside {ROWS} rows on {decode_sms} SMs, {chosen}",
                "prefill us": prefill_us,
                "decode us": decode_us,
            }


def _choose(decoding: Neighbour, prefilling: Neighbour, times: ProductTimes, *, both: bool) -> None:
    wanted = [
        Wanted(prefilling.multiply, prefilling.stream, weights, (prefilling.rows,), decoding if both else None)
        for weights in prefilling.weights
    ]
    tune(wanted, times, lambda done, total: None)


def _layer_us(decoding: Neighbour, prefilling: Neighbour, times: ProductTimes) -> list[float]:
    """Of a prefill's products and of decode's, the medians of five."""
    pair = times.load(prefilling), times.load(decoding)
    seconds = [times.side_by_side(prefilling.stream, *pair) for _ in range(5)]
    return [1e6 * sorted(each)[2] / LOAD_LAYERS for each in zip(*seconds, strict=True)]
