"""The CPU device: real weights through torch, every call complete when it returns.

Owns the model, the KV cache and the sampler of a CPU worker. There are no streams to order, so its driver table is the
one in which nothing is ever pending.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine_core.config import WorkerConfig
from engine_core.device.base import Batch, Device, Int32, LaneSizes, Sampled, no_room, page_budget
from engine_core.device.driver import Driver, ImmediateDriver, Watch
from engine_core.device.lanes import LaneStream
from engine_core.model_config import ModelConfig, load_model_config
from engine_core.models.dense import DenseModel
from engine_core.models.weights import load_model
from engine_core.ops.attention import CpuAttention, PagedKV
from engine_core.step import Lane, RowStart
from engine_core.worker.sampler import Sampler


class CpuCompute:
    """One forward at a time, on this thread's torch threads."""

    def __init__(self, model: DenseModel, attention: CpuAttention, sampler: Sampler, max_num_seqs: int) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._last_token = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._hidden: dict[int, torch.Tensor] = {}
        self._sampled: dict[int, Sampled] = {}

    def start_row(self, start: RowStart, batch: Batch) -> None:
        ids = np.frombuffer(start.ids, "<i4")
        self._sampler.set_row(start.slot, start.sampling, start.prompt_len, ids)

    def end_rows(self, slots: list[int]) -> None:
        """Nothing to do: `start_row` overwrites all that a slot holds."""

    def append_pages(self, slots: Int32, columns: Int32, pages: Int32) -> None:
        """Nothing to do: attention reads the host's tables."""

    @torch.inference_mode()
    def forward(self, batch: Batch, ring: int) -> None:
        decode = torch.from_numpy(batch.slots[: batch.decode_rows]).long()
        ids = torch.cat((self._last_token[decode], torch.from_numpy(batch.ids).long()))
        ends = np.cumsum(batch.lengths)
        positions = np.arange(int(ends[-1])) + np.repeat(batch.starts - (ends - batch.lengths), batch.lengths)
        self._attention.begin(batch.page_tables[batch.slots], batch.starts, batch.lengths)
        hidden = self._model.forward(ids, torch.from_numpy(positions), self._attention)
        self._hidden[ring] = hidden[torch.from_numpy(ends[batch.sample_rows] - 1)]
        prompts = [
            self._sampler.prompt_logprobs(
                self._model, hidden[ends[rows.row] - batch.lengths[rows.row] :][: len(rows.targets)], rows
            )
            for rows in batch.prompt_logprobs
        ]
        self._sampled[ring] = Sampled(np.empty(0, np.int32), None, prompts)

    @torch.inference_mode()
    def sample(self, batch: Batch, ring: int) -> None:
        if len(batch.sample_rows) == 0:
            return
        slots = batch.slots[batch.sample_rows]
        drawn = self._sampler.sample(self._model.logits(self._hidden[ring]), slots, batch.sample_positions, batch.masks)
        self._last_token[torch.from_numpy(slots).long()] = drawn.tokens.long()
        sampled = self._sampled[ring]
        sampled.tokens, sampled.logprobs = drawn.tokens.numpy(), drawn.logprobs

    def read(self, batch: Batch, ring: int) -> Sampled:
        self._hidden.pop(ring)
        return self._sampled.pop(ring)

    def is_fatal(self, error: BaseException) -> bool:
        """Nothing runs behind the host's back here."""
        return False

    def close(self) -> None:
        self._hidden.clear()


def open_device(config: WorkerConfig, watch: Watch, progress: Callable[[str, int, int], None]) -> Device:
    """Load the model into memory and set up its KV cache. Raises ConfigError."""
    folder = Path(config.model)
    model_config = load_model_config(folder)
    threads = config.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    pages, max_model_len = page_budget(config, model_config, dtype.itemsize)
    model_config = dataclasses.replace(model_config, max_position=max_model_len)  # no tables beyond what is served
    model = load_model(
        folder,
        model_config,
        dtype=dtype,
        device=torch.device("cpu"),
        load_format=config.load_format,
        progress=progress,
    )
    attention = CpuAttention(_kv_cache(model_config, pages, config.page_size, dtype), model_config.head_dim**-0.5)
    sampler = Sampler(config.max_num_seqs, model_config.vocab_size, torch.device("cpu"))
    return Device(
        driver=Driver(ImmediateDriver(), watch),
        streams={Lane.PRIMARY: LaneStream(0)},
        compute=CpuCompute(model, attention, sampler, config.max_num_seqs),
        vocab_size=model_config.vocab_size,
        total_pages=pages,
        max_model_len=max_model_len,
        dtype=str(dtype).removeprefix("torch."),
        name=f"cpu ({threads} threads)",
        lanes=LaneSizes(),
    )


def _kv_cache(model: ModelConfig, pages: int, page_size: int, dtype: torch.dtype) -> PagedKV:
    """Raises ConfigError where the system doesn't give so much address space."""
    try:
        return PagedKV(
            num_layers=model.num_layers,
            total_pages=pages,
            page_size=page_size,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
        )
    except (OSError, OverflowError) as error:
        raise no_room(pages, error) from error
