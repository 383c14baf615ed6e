"""Opens a GPU: streams and partitions, weights, KV memory, graphs, in an order in which each may fail cleanly.

Owns the sizes of everything and the start-up order. After it nothing allocates on the device but rare row work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_core.config import WorkerConfig
from engine_core.device.base import Device, LaneSizes
from engine_core.device.cuda.compute import CudaCompute, Heads, LaneWork, Replay
from engine_core.device.cuda.driver import CudaTable
from engine_core.device.cuda.graphs import CHUNK_SIZES, DECODE_SIZES, GraphPool, buckets
from engine_core.device.cuda.rows import DeviceRows
from engine_core.device.cuda.staging import Staging
from engine_core.device.driver import Driver, Watch
from engine_core.device.green import SM_ALIGNMENT, GreenPartition
from engine_core.device.lanes import LaneStream
from engine_core.device.streams import open_streams
from engine_core.errors import ConfigError
from engine_core.model_config import ModelConfig, load_model_config
from engine_core.models.layers import rotary_frequencies
from engine_core.models.weights import load_parameters
from engine_core.ops.cuda.attention import DecodeAttention
from engine_core.ops.cuda.decoder import CudaDecoder
from engine_core.ops.cuda.layer import Heads as HeadShape
from engine_core.ops.cuda.layer import rope_table
from engine_core.ops.cuda.nvrtc import CodeCache, CudaKernels
from engine_core.ops.cuda.prefill import PagedPrefill, PrefillLimits, choose_backend
from engine_core.ops.cuda.sampling import Sampler, SamplingTables
from engine_core.ops.cuda.splits import PAGE
from engine_core.step import Lane

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete

Progress = Callable[[str, int, int], None]
CAPABILITY = (9, 0)
WORKSPACE_BYTES = 128 << 20
RESERVE_BYTES = 1 << 30
"""Left free beside what was measured: library workspaces, row work, fragmentation."""


@dataclass(slots=True)
class _Opened:
    """What exists before the KV cache does."""

    config: WorkerConfig
    model: ModelConfig
    shape: HeadShape
    device: torch.device
    driver: Driver
    streams: dict[Lane, LaneStream]
    partition: GreenPartition | None
    decoder: CudaDecoder
    kernels: CudaKernels
    page_table: torch.Tensor
    tables: SamplingTables
    sampler: Sampler
    lanes: dict[Lane, LaneWork]
    heads: Heads
    row_buckets: list[int]
    token_buckets: list[int]
    sms: int

    @property
    def scale(self) -> float:
        return float(self.model.head_dim**-0.5)


def open_device(config: WorkerConfig, watch: Watch, progress: Progress) -> Device:
    """Make the GPU ready to serve. Raises ConfigError for what can't be had, naming what would work.

    After an error the process must end: streams are left to the driver then, since buffers of unfinished frames still
    name them.
    """
    model = load_model_config(Path(config.model))
    ordinal = int(config.device.partition(":")[2] or 0)
    properties = _check(config, model, ordinal)
    _cuda.set_device(ordinal)
    torch.zeros(1, device="cuda")  # makes the context current
    driver = Driver(CudaTable(ordinal), watch)
    created = ExitStack()
    opened = _open(config, model, ordinal, properties.multi_processor_count, driver, created, progress)
    max_model_len, kv = _kv_cache(opened, progress)
    compute = _compute(opened, kv, created, progress)
    return Device(
        driver=driver,
        streams=opened.streams,
        compute=compute,
        vocab_size=model.vocab_size,
        total_pages=kv.shape[1],
        max_model_len=max_model_len,
        dtype="bfloat16",
        name=f"cuda:{ordinal} {properties.name}",
        lanes=_lane_sizes(opened),
        timed=True,
    )


def _check(config: WorkerConfig, model: ModelConfig, ordinal: int) -> Any:
    if not _cuda.is_available():
        raise ConfigError(f"--device {config.device}: torch sees no CUDA device here; use --device cpu")
    if ordinal >= _cuda.device_count():
        raise ConfigError(f"--device {config.device}: there are {_cuda.device_count()} GPUs, numbered from 0")
    properties = _cuda.get_device_properties(ordinal)
    if (properties.major, properties.minor) != CAPABILITY:
        raise ConfigError(
            f"--device {config.device}: {properties.name} has compute capability {properties.major}."
            f"{properties.minor}; the kernels are made for 9.0 (H100, H200); use --device cpu"
        )
    if config.dtype == "float32":
        raise ConfigError("--dtype float32 can't be served on cuda; use bfloat16 or auto")
    if config.page_size != PAGE:
        raise ConfigError(f"--page-size is {config.page_size}; the CUDA kernels take pages of {PAGE}")
    if model.o_bias or model.mlp_bias:
        raise ConfigError("the CUDA kernels serve no biases on the output and MLP projections; use --device cpu")
    return properties


def _open(
    config: WorkerConfig,
    model: ModelConfig,
    ordinal: int,
    sms: int,
    driver: Driver,
    created: ExitStack,
    progress: Progress,
) -> _Opened:
    device = torch.device("cuda", ordinal)
    streams, partition = open_streams(driver, config.decode_overlap, config.decode_sms, created)
    parameters = load_parameters(
        Path(config.model),
        model,
        dtype=torch.bfloat16,
        device=device,
        load_format=config.load_format,
        progress=progress,
    )
    progress("load kernels", 0, 1)
    cache = CodeCache(Path.home() / ".cache" / "greenlane" / "kernels")
    kernels = CudaKernels(cache, lambda: int(_cuda.current_stream().cuda_stream))
    shape = HeadShape(model.num_heads, model.num_kv_heads, model.head_dim, config.page_size)
    width = -(-_max_model_len(config, model) // config.page_size)
    page_table = torch.zeros(config.max_num_seqs + 1, width, dtype=torch.int32, device=device)
    rope = _rope(model, _max_model_len(config, model)).to(device)
    decoder = CudaDecoder(model, parameters, kernels, shape, rope, page_table)
    rows = config.max_num_seqs
    tables = SamplingTables(rows, model.vocab_size, device)
    progress("load kernels", 1, 1)
    opened = _Opened(
        config=config,
        model=model,
        shape=shape,
        device=device,
        driver=driver,
        streams=streams,
        partition=partition,
        decoder=decoder,
        kernels=kernels,
        page_table=page_table,
        tables=tables,
        sampler=Sampler(tables, rows, kernels),
        lanes={},
        heads=Heads(
            torch.zeros(rows, model.hidden_size, dtype=torch.bfloat16, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        ),
        row_buckets=buckets(rows, DECODE_SIZES),
        token_buckets=buckets(config.max_num_batched_tokens, CHUNK_SIZES),
        sms=sms,
    )
    progress("prepare prefill attention", 0, 1)
    for lane in streams:
        opened.lanes[lane] = _lane(opened, lane, width)
    progress("prepare prefill attention", 1, 1)
    return opened


def _rope(model: ModelConfig, positions: int) -> torch.Tensor:
    frequencies, factor = rotary_frequencies(model.rope, model.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return rope_table(angles.cos() * factor, angles.sin() * factor)


def _lane_sizes(opened: _Opened) -> LaneSizes:
    if opened.partition is None:
        return LaneSizes(opened.sms, opened.sms if Lane.PREFILL in opened.streams else 0, SM_ALIGNMENT)
    return LaneSizes(opened.partition.decode_sms, opened.partition.prefill_sms, SM_ALIGNMENT)


def _max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    wanted = model.max_position if config.max_model_len is None else config.max_model_len
    if wanted > model.max_position:
        raise ConfigError(f"--max-model-len is {wanted}; the model's positions end at {model.max_position}")
    return wanted


def _lane(opened: _Opened, lane: Lane, width: int) -> LaneWork:
    config, device, rows = opened.config, opened.device, opened.config.max_num_seqs
    stream = _cuda.ExternalStream(int(opened.streams[lane].stream))
    rings = config.async_depth + 1
    with _cuda.stream(stream):
        staging = Staging(opened.driver, opened.streams[lane], rows, opened.token_buckets[-1], device)
        for name in ("slots", "sample_slots", "token_slots"):
            staging.on_device[name].fill_(-1)
        prefill = PagedPrefill(
            opened.shape,
            PrefillLimits(rows, opened.token_buckets[-1], rows * width),
            opened.scale,
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            choose_backend(CAPABILITY),
        )
        hidden = opened.model.hidden_size
        work = LaneWork(
            stream=stream,
            staging=staging,
            prefill=prefill,
            residual=torch.zeros(opened.token_buckets[-1], hidden, dtype=torch.bfloat16, device=device),
            picked=[torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device) for _ in range(rings)],
            tokens=[torch.zeros(rows, dtype=torch.int32, pin_memory=True) for _ in range(rings)],
        )
    stream.synchronize()
    return work


# ------------------------------ what the graphs do


def _ragged(opened: _Opened, lane: Lane, bucket: int, kv: torch.Tensor) -> Callable[[], None]:
    """A forward over `bucket` tokens of chunks, on the primary lane beside decode rows."""
    work, decoder = opened.lanes[lane], opened.decoder
    staged = work.staging.on_device
    slots, positions = staged["token_slots"][:bucket], staged["token_positions"][:bucket]

    def attend(qkv: torch.Tensor, pool: torch.Tensor, out: torch.Tensor) -> None:
        work.prefill.run(qkv[:, : opened.shape.query], pool, out)

    def run() -> None:
        ids = staged["ids"][:bucket]
        if lane is Lane.PRIMARY:
            opened.page_table.view(-1).index_copy_(0, staged["targets"], staged["pages"])
            ids = torch.where(ids < 0, opened.tables.last_token[slots.clamp(min=0)], ids)
        residual = work.residual[:bucket]
        residual.copy_(decoder.embedding[ids])
        decoder.layers(residual, slots, positions, kv, attend, fused=False)

    return run


def _decode(opened: _Opened, bucket: int, attention: DecodeAttention, kv: torch.Tensor) -> Callable[[], None]:
    """One token for each of `bucket` rows; the rows' final states are left where the head reads them."""
    staged, rows = opened.lanes[Lane.PRIMARY].staging.on_device, opened.heads.rows[:bucket]
    slots, positions = staged["slots"][:bucket], staged["positions"][:bucket]

    def attend(qkv: torch.Tensor, pool: torch.Tensor, out: torch.Tensor) -> None:
        attention(qkv, pool, slots, positions, opened.page_table, out, opened.scale)

    def run() -> None:
        opened.page_table.view(-1).index_copy_(0, staged["targets"][:bucket], staged["pages"][:bucket])
        opened.decoder.embed_last(opened.tables.last_token, slots, rows)
        attention.plan(slots, positions)
        opened.decoder.layers(rows, slots, positions, kv, attend, fused=True)

    return run


def _head(opened: _Opened, bucket: int) -> Callable[[], None]:
    staged = opened.lanes[Lane.PRIMARY].staging.on_device
    slots, positions = staged["sample_slots"][:bucket], staged["sample_positions"][:bucket]

    def run() -> None:
        logits = opened.decoder.logits(opened.heads.rows[:bucket])
        opened.sampler(logits, slots, positions, opened.heads.tokens[:bucket])

    return run


# ------------------------------ KV memory and graphs


def _kv_cache(opened: _Opened, progress: Progress) -> tuple[int, torch.Tensor]:
    """(max_model_len, KV [layers, pages, 2, page, kv heads, D]), sized after every lane ran its largest chunk (O3)."""
    config, model, shape = opened.config, opened.model, opened.shape
    page_shape = (2, config.page_size, shape.kv, shape.head_dim)
    page_bytes = model.kv_bytes_per_token(2) * config.page_size
    progress("warm up", 0, 1)
    small = torch.zeros(model.num_layers, 1, *page_shape, dtype=torch.bfloat16, device=opened.device)
    _cuda.reset_peak_memory_stats()
    before = _cuda.memory_allocated()
    for lane, work in opened.lanes.items():
        with _cuda.stream(work.stream):
            _ragged(opened, lane, opened.token_buckets[-1], small)()
        work.stream.synchronize()
    with _cuda.stream(opened.lanes[Lane.PRIMARY].stream):
        _head(opened, opened.row_buckets[-1])()
    _cuda.synchronize()
    activations = _cuda.max_memory_allocated() - before
    del small
    _cuda.empty_cache()
    progress("warm up", 1, 1)
    memory = config.kv_cache_memory
    if memory is None:
        free, total = _cuda.mem_get_info()
        reserve = 2 * activations * (len(opened.lanes) + 1) + RESERVE_BYTES
        memory = int(total * config.gpu_memory_utilization) - (total - free) - reserve
    pages = memory // page_bytes
    wanted, fits = _max_model_len(config, model), pages * config.page_size
    if fits < 2 or (config.max_model_len is not None and wanted > fits):
        raise ConfigError(
            f"the KV cache would hold {max(fits, 0)} tokens ({max(memory, 0)} bytes); a context of {wanted} needs "
            f"{-(-wanted // config.page_size) * page_bytes}: raise --gpu-memory-utilization or lower --max-model-len"
        )
    kv = torch.zeros(model.num_layers, pages, *page_shape, dtype=torch.bfloat16, device=opened.device)
    return min(wanted, fits), kv


def _compute(opened: _Opened, kv: torch.Tensor, created: ExitStack, progress: Progress) -> CudaCompute:
    """Capture every graph, largest first; one pool for what runs on the primary lane, one for the prefill lane (S3)."""
    pools = {lane: GraphPool() for lane in opened.lanes}
    primary = opened.lanes[Lane.PRIMARY].stream
    decode_streams = {False: (primary, opened.sms)}
    if opened.partition is not None:
        green = _cuda.ExternalStream(int(opened.partition.decode.stream))
        decode_streams[True] = (green, opened.partition.decode_sms)
    total = len(opened.row_buckets) * (len(decode_streams) + 1) + len(opened.token_buckets) * len(pools)
    done = 0
    for lane, work in opened.lanes.items():
        for bucket in reversed(opened.token_buckets):
            with _cuda.stream(work.stream):
                work.prefill.plan([0], [bucket], [np.zeros(-(-bucket // PAGE), np.int32)])
            work.ragged[bucket] = pools[lane].capture(work.stream, _ragged(opened, lane, bucket, kv))
            progress("capture graphs", done := done + 1, total)
    decode: dict[bool, dict[int, Replay]] = {}
    for beside, (stream, sms) in decode_streams.items():
        attention = DecodeAttention(opened.shape, opened.row_buckets[-1], sms, opened.device, opened.kernels)
        decode[beside] = {}
        for bucket in reversed(opened.row_buckets):
            step = _decode(opened, bucket, attention, kv)
            decode[beside][bucket] = pools[Lane.PRIMARY].capture(stream, step)
            progress("capture graphs", done := done + 1, total)
    decode.setdefault(True, decode[False])
    for bucket in reversed(opened.row_buckets):
        opened.heads.graphs[bucket] = pools[Lane.PRIMARY].capture(primary, _head(opened, bucket))
        progress("capture graphs", done := done + 1, total)
    return CudaCompute(
        decoder=opened.decoder,
        sampler=opened.sampler,
        rows=DeviceRows(opened.tables, opened.sampler, opened.page_table),
        lanes=opened.lanes,
        heads=opened.heads,
        decode=decode,
        row_buckets=opened.row_buckets,
        token_buckets=opened.token_buckets,
        page_table=opened.page_table,
        close=created.pop_all().close,
    )
