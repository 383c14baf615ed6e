"""What a device offers to the runner, and the batch that it computes.

Owns the data of one forward and the `Compute` protocol behind which torch, CUDA graphs or a simulation stand. Ordering
is not here: it goes through the driver table (`driver.py`), lane by lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine_core.config import WorkerConfig
from engine_core.device.driver import Driver
from engine_core.device.lanes import LaneStream
from engine_core.errors import ConfigError
from engine_core.model_config import ModelConfig
from engine_core.ops.masks import MaskWords
from engine_core.step import Lane, LogprobBlock, PromptLogprobBlock, RowStart, StepTimes

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowMask:
    """What one sampling row may draw."""

    row: int
    """Index among the rows that sample."""
    words: MaskWords
    """At least one id of the vocabulary is allowed."""


@dataclass(slots=True)
class Batch:
    """A ragged forward: row r computes positions starts[r] .. starts[r]+lengths[r]-1 of the sequence in slots[r].

    Decode rows come first; their single input token is the one sampled last in that slot, read on the device. T is the
    sum of lengths, R the number of rows, S the number of rows that sample.
    """

    step: int
    lane: Lane
    slots: Int32
    """[R]"""
    starts: Int32
    """[R]"""
    lengths: Int32
    """[R]"""
    decode_rows: int
    ids: Int32
    """[T - decode_rows]: input ids of the chunk rows, concatenated."""
    page_tables: Int32
    """[max_num_seqs, pages per sequence]: the whole table by slot; a row's first ceil((start+length)/page)
    are valid."""
    sample_rows: Int32
    """[S] row indexes, ascending; decode rows all sample."""
    sample_positions: Int32
    """[S] index in prompt + output of the token drawn."""
    prompt_logprobs: list[PromptRows] = field(default_factory=list)
    masks: list[RowMask] = field(default_factory=list)
    """Of the rows that follow a grammar; there before the forward, but for a batch of the prefill lane, which has them
    when it joins."""
    partition: int | None = None
    """In force: a batch of the prefill lane runs on its share of it, and decode keeps to the other (rule L2). None: no
    prefill is in flight, and a step has the whole GPU."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Chunk row `row` describes prompt tokens start+1 .. start+len(targets) with `top` alternatives each."""

    row: int
    slot: int
    start: int
    targets: Int32
    top: int


@dataclass(slots=True)
class Sampled:
    """What a batch drew, on the host."""

    tokens: Int32
    """[S]"""
    logprobs: LogprobBlock | None = None
    """Rows index `tokens`, ascending."""
    prompt_logprobs: list[PromptLogprobBlock] = field(default_factory=list)


class Compute(Protocol):
    """The work itself. Calls enqueue on a lane and return; results are read after the lane's completion is proven.

    Plain Python exceptions and out-of-memory errors are recoverable once the lanes are synchronized; anything that a
    device reports about earlier work is not (rule O14): `is_fatal` tells them apart.
    """

    def start_row(self, start: RowStart, batch: Batch) -> None:
        """The slot's tables begin anew: enqueue that on the lane and partition of `batch`, which is launched behind it.

        Nothing in flight on another lane may use the slot (rule O12)."""

    def end_rows(self, slots: list[int]) -> None:
        """These slots' state is void (they are about to be started again), pages that wait to be appended included."""

    def append_pages(self, slots: Int32, columns: Int32, pages: Int32) -> None:
        """The host's page tables have grown: pages[i] stands in row slots[i] at columns[i], for all later forwards of
        the primary lane."""

    def forward(self, batch: Batch, ring: int) -> None:
        """Stage inputs in ring slot `ring` and enqueue the forward on the batch's lane; what is needed to sample stays
        in that ring slot."""

    def sample(self, batch: Batch, ring: int) -> None:
        """Enqueue on the primary lane: draw one token for each sampling row, remember it as the slot's last token, and
        copy the results to the host's side of the ring slot. Rows with a mask draw what it allows."""

    def read(self, batch: Batch, ring: int) -> Sampled:
        """Results of a batch whose completion is proven."""

    def is_fatal(self, error: BaseException) -> bool:
        """Whether the error may speak of work on the device, so that nothing can be proven any more."""

    def close(self) -> None:
        """Free everything; every lane is proven idle by the caller."""


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """SMs of each lane; 0 where there are none to count. With several partitions: those of the one that leaves decode
    most."""

    decode_sms: int = 0
    prefill_sms: int = 0
    sm_alignment: int = 0
    choices: tuple[int, ...] = ()
    """SMs for decode of every partition, in their order; empty without partitions."""


@dataclass(slots=True)
class Device:
    """An opened device: its calls, its work, its sizes."""

    driver: Driver
    streams: dict[Lane, LaneStream]
    """Where each lane's work goes. Shared: `Lanes` steers the prefill lane from one partition to another."""
    compute: Compute
    vocab_size: int
    total_pages: int
    max_model_len: int
    dtype: str
    name: str
    """For people."""
    lanes: LaneSizes
    partitions: Sequence[LaneStream] = ()
    """The prefill lane's stream with each partition in force; empty where the GPU isn't partitioned."""
    timed: bool = False
    """Its events can tell time."""
    times: StepTimes | None = None
    """What forwards take, where the policy asks for it."""


DEFAULT_KV_BYTES = 1 << 30


def no_room(pages: int, error: Exception) -> ConfigError:
    """Of a machine whose memory doesn't hold so many."""
    return ConfigError(f"{pages} pages of KV can't be had on this machine ({error}); name less with --kv-cache-memory")


def page_budget(config: WorkerConfig, model: ModelConfig, item_bytes: int) -> tuple[int, int]:
    """(KV pages, max_model_len) for a KV cache of `--kv-cache-memory` bytes, 1 GiB unless it is given.

    Without `--max-model-len` the context is the model's, cut to what the pages hold. Raises ConfigError when a sequence
    of the length asked for could never fit.
    """
    memory = DEFAULT_KV_BYTES if config.kv_cache_memory is None else config.kv_cache_memory
    page_bytes = model.kv_bytes_per_token(item_bytes) * config.page_size
    pages = min(memory // page_bytes, (1 << 31) - 1)
    wanted = model.max_position if config.max_model_len is None else config.max_model_len
    if wanted > model.max_position:
        raise ConfigError(f"--max-model-len is {wanted}; the model's positions end at {model.max_position}")
    fits = pages * config.page_size
    if fits < 2 or (config.max_model_len is not None and wanted > fits):
        raise ConfigError(
            f"--kv-cache-memory of {memory} bytes holds {fits} tokens; a context of {wanted} needs "
            f"{-(-wanted // config.page_size) * page_bytes} bytes: raise it or lower --max-model-len"
        )
    return pages, min(wanted, fits)
