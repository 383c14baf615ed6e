"""Opens a GPU: streams and partitions, weights, KV memory, graphs, in an order in which each may fail cleanly.

Owns the sizes of everything and the start-up order. After it nothing allocates on the device but rare row work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine_core.config import WorkerConfig
from engine_core.device.base import Device, LaneSizes
from engine_core.device.cuda.capture import Capture, tune_products
from engine_core.device.cuda.compute import CudaCompute, Excursion, Heads, LaneWork
from engine_core.device.cuda.driver import CudaTable
from engine_core.device.cuda.forwards import Opened, head, ragged
from engine_core.device.cuda.graphs import (
    CHUNK_SIZES,
    DECODE_SIZES,
    LANE_SIZES,
    MIXED_ROWS,
    buckets,
    mixed_chunk_sizes,
)
from engine_core.device.cuda.masks import MaskStaging
from engine_core.device.cuda.measure import step_times
from engine_core.device.cuda.rows import DeviceRows
from engine_core.device.cuda.staging import RING, Staging
from engine_core.device.driver import Driver, Watch
from engine_core.device.green import SM_ALIGNMENT, lane_sizes
from engine_core.device.lanes import LaneStream
from engine_core.device.streams import open_streams
from engine_core.errors import ConfigError
from engine_core.model_config import ModelConfig, load_model_config
from engine_core.models.layers import rotary_frequencies
from engine_core.models.weights import load_parameters
from engine_core.ops.cuda.cublaslt import CublasLt
from engine_core.ops.cuda.decoder import CudaDecoder
from engine_core.ops.cuda.flashinfer_kernel import paged_run
from engine_core.ops.cuda.layer import Heads as HeadShape
from engine_core.ops.cuda.layer import rope_table
from engine_core.ops.cuda.matmul import Choices, choices_file
from engine_core.ops.cuda.nvrtc import CodeCache, CudaKernels
from engine_core.ops.cuda.prefill import LaneSms, PagedPrefill, PrefillLimits
from engine_core.ops.cuda.sampling import Sampler, SamplingTables
from engine_core.ops.cuda.splits import PAGE
from engine_core.step import MAX_CHUNKS, MOST_PRIMARY_TOKENS, Lane, StepTimes

_cuda: Any = torch.cuda  # torch's annotations of streams are incomplete

Progress = Callable[[str, int, int], None]
CAPABILITY = (9, 0)
CODE_FOLDER = Path.home() / ".cache" / "greenlane" / "kernels"
"""Machine code, and which products take which algorithm."""
RESERVE_BYTES = 1 << 30
"""Left free beside what was measured: library workspaces, row work, fragmentation."""


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
    opened = _open(config, model, ordinal, properties, driver, created, progress)
    max_model_len, kv = _kv_cache(opened, progress)
    compute, times = _compute(opened, kv, created, progress)
    _cuda.set_stream(opened.primary.stream)
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
        partitions=[partition.prefill for partition in opened.partitions],
        timed=True,
        times=times,
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
    properties: Any,
    driver: Driver,
    created: ExitStack,
    progress: Progress,
) -> Opened:
    device = torch.device("cuda", ordinal)
    streams, partitions = open_streams(driver, config.decode_overlap, config.decode_sms, created)
    shape = HeadShape(model.num_heads, model.num_kv_heads, model.head_dim, config.page_size)
    width, rows = -(-_max_model_len(config, model) // config.page_size), config.max_num_seqs
    page_table = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
    decoder, kernels = _decoder(config, model, shape, page_table, progress)
    tables = SamplingTables(rows, model.vocab_size, device)
    library = CublasLt(properties.multi_processor_count)
    opened = Opened(
        config=config,
        model=model,
        shape=shape,
        device=device,
        driver=driver,
        streams=streams,
        partitions=partitions,
        decoder=decoder,
        kernels=kernels,
        page_table=page_table,
        tables=tables,
        sampler=Sampler(tables, rows, kernels),
        works=[],
        heads=Heads(
            torch.zeros(rows, model.hidden_size, dtype=torch.bfloat16, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        ),
        row_buckets=buckets(rows, DECODE_SIZES),
        chunk_sizes=_chunk_sizes(config),
        lane_sizes=buckets(config.max_num_batched_tokens, LANE_SIZES),
        library=library,
        choices=Choices(choices_file(CODE_FOLDER, properties.name, library.version)),
        sms=library.sms,
    )
    progress("prepare prefill attention", 0, 1)
    attend = paged_run(shape.head_dim, CODE_FOLDER)
    opened.works.append(_work(opened, streams[Lane.PRIMARY], opened.sms, width, attend))
    prefills = [(partition.prefill, partition.prefill_sms) for partition in partitions]
    if Lane.PREFILL in streams and not partitions:
        prefills = [(streams[Lane.PREFILL], opened.sms)]
    opened.works += [_work(opened, target, sms, width, attend) for target, sms in prefills]
    progress("prepare prefill attention", 1, 1)
    return opened


def _chunk_sizes(config: WorkerConfig) -> dict[int, list[int]]:
    """Chunks that share a forward with decode rows are as large as the lane mode may ask for."""
    most, rows, auto = config.max_num_batched_tokens, config.max_num_seqs, config.decode_overlap == "auto"
    mixed = buckets(rows, MIXED_ROWS) if auto or config.decode_overlap == "off" else []
    most_mixed = min(most, MOST_PRIMARY_TOKENS) if auto else most
    return {0: buckets(most, CHUNK_SIZES)} | {count: mixed_chunk_sizes(count, most_mixed) for count in mixed}


def _decoder(
    config: WorkerConfig, model: ModelConfig, shape: HeadShape, page_table: torch.Tensor, progress: Progress
) -> tuple[CudaDecoder, CudaKernels]:
    """Weights on the device, and the kernels that run over them, compiled unless they were before."""
    device = page_table.device
    parameters = load_parameters(
        Path(config.model),
        model,
        dtype=torch.bfloat16,
        device=device,
        load_format=config.load_format,
        progress=progress,
    )
    progress("load kernels", 0, 1)
    cache = CodeCache(CODE_FOLDER)
    # torch's own method makes an object of the stream first, which takes longer than a launch
    kernels = CudaKernels(cache, partial(torch._C._cuda_getCurrentRawStream, device.index))
    rope = _rope(model, _max_model_len(config, model)).to(device)
    decoder = CudaDecoder(model, parameters, kernels, shape, rope, page_table)
    progress("load kernels", 1, 1)
    return decoder, kernels


def _rope(model: ModelConfig, positions: int) -> torch.Tensor:
    frequencies, factor = rotary_frequencies(model.rope, model.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return rope_table(angles.cos() * factor, angles.sin() * factor)


def _lane_sizes(opened: Opened) -> LaneSizes:
    if not opened.partitions:
        return LaneSizes(opened.sms, opened.sms if Lane.PREFILL in opened.streams else 0, SM_ALIGNMENT)
    return lane_sizes(opened.partitions)


def _max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    wanted = model.max_position if config.max_model_len is None else config.max_model_len
    if wanted > model.max_position:
        raise ConfigError(f"--max-model-len is {wanted}; the model's positions end at {model.max_position}")
    return wanted


def _work(opened: Opened, target: LaneStream, sms: int, width: int, attend: Callable[..., None]) -> LaneWork:
    """Of the primary lane first."""
    config, device, rows = opened.config, opened.device, opened.config.max_num_seqs
    stream, primary = _cuda.ExternalStream(int(target.stream)), not opened.works
    rings = config.async_depth + 1
    chunks = min(rows, MAX_CHUNKS)
    with _cuda.stream(stream):
        staging = Staging(
            opened.driver,
            target,
            rows,
            opened.most_tokens,
            device,
            in_graph=config.staged_inputs == "off",
        )
        prefill = PagedPrefill(
            opened.shape,
            PrefillLimits(chunks, opened.most_chunk_tokens, chunks * width),
            opened.scale,
            LaneSms(opened.sms, sms),
            opened.kernels,
            attend,
            device,
            rings=rings,
            branch=_cuda.Stream() if primary else None,
        )
        hidden = opened.model.hidden_size
        work = LaneWork(
            stream=stream,
            current=nullcontext() if primary else Excursion(stream, opened.primary.stream),
            staging=staging,
            prefill=prefill,
            multiply=opened.multiply(sms),
            residual=torch.zeros(opened.most_tokens, hidden, dtype=torch.bfloat16, device=device),
            states=opened.heads.rows if primary else torch.zeros_like(opened.heads.rows),
            picked=[torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device) for _ in range(rings)],
            tokens=[torch.zeros(rows, dtype=torch.int32, pin_memory=True) for _ in range(rings)],
        )
    stream.synchronize()
    return work


# ------------------------------ KV memory and graphs


def _kv_cache(opened: Opened, progress: Progress) -> tuple[int, torch.Tensor]:
    """(max_model_len, KV [layers, pages, 2, page, kv heads, D]), sized after every lane ran its largest chunk (O3).

    Through one layer or two: the next reuse their memory.
    """
    config, model, shape = opened.config, opened.model, opened.shape
    page_shape = (2, config.page_size, shape.kv, shape.head_dim)
    page_bytes = model.kv_bytes_per_token(2) * config.page_size
    progress("warm up", 0, 1)
    small = torch.zeros(model.num_layers, 1, *page_shape, dtype=torch.bfloat16, device=opened.device)
    _cuda.reset_peak_memory_stats()
    before = _cuda.memory_allocated()
    attention = opened.attention(opened.sms)
    for work in opened.works:
        rows = max(opened.chunk_sizes) if work is opened.primary else 0
        with _cuda.stream(work.stream):
            ragged(opened, work, rows, opened.most_chunk_tokens, attention, attention, small).rehearse()
        work.stream.synchronize()
    with _cuda.stream(opened.primary.stream):
        head(opened, opened.row_buckets[-1], opened.primary.multiply)()
    _cuda.synchronize()
    activations = _cuda.max_memory_allocated() - before
    del small
    _cuda.empty_cache()
    progress("warm up", 1, 1)
    memory = config.kv_cache_memory
    if memory is None:
        free, total = _cuda.mem_get_info()
        reserve = 2 * activations * (len(opened.streams) + 1) + RESERVE_BYTES
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


def _compute(
    opened: Opened, kv: torch.Tensor, created: ExitStack, progress: Progress
) -> tuple[CudaCompute, StepTimes | None]:
    """The work, captured; and what it takes, for a policy that asks."""
    tune_products(opened, progress)
    capture = Capture(opened, kv, progress)
    capture.ragged()
    decoding = capture.decode()
    capture.heads()
    times = None
    if opened.config.decode_overlap == "auto":
        progress("measure steps", 0, 1)
        times = step_times(opened, decoding, kv.shape[1])
        progress("measure steps", 1, 1)
    compute = CudaCompute(
        decoder=opened.decoder,
        sampler=opened.sampler,
        rows=DeviceRows(opened.tables, opened.sampler, opened.page_table),
        masks=_mask_staging(opened),
        works=opened.works,
        heads=opened.heads,
        decode=decoding,
        row_buckets=opened.row_buckets,
        chunk_sizes=opened.chunk_sizes,
        lane_sizes=opened.lane_sizes,
        page_table=opened.page_table,
        close=created.pop_all().close,
    )
    return compute, times


def _mask_staging(opened: Opened) -> MaskStaging:
    on_device = opened.sampler.masks
    pinned = [torch.empty_like(on_device, device="cpu", pin_memory=True) for _ in range(RING)]
    sizes = opened.config.max_num_seqs, opened.model.vocab_size
    return MaskStaging(opened.driver, opened.streams[Lane.PRIMARY], pinned, on_device, *sizes)
