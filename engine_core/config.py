"""Settings of an engine core and of its workers, checked once, then frozen.

Owns the defaults and the rules between settings. Parses no flags (`cli.py` does) and reads no environment variable.
"""

from __future__ import annotations

import msgspec

from access.policy import Access, AccessError, split_address
from engine_core.errors import ConfigError

MIB = 1 << 20
DEVICES = ("cpu", "cuda", "fake")
DTYPES = ("auto", "float32", "bfloat16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
OVERLAP_MODES = ("off", "stream", "green", "auto")
STAGED_INPUTS = ("on", "off")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `greenlane engine` serves and how. Flag names are these with dashes."""

    model: str
    """A folder with config.json, or a repository id that huggingface-hub has or may fetch."""
    device: str = "cpu"
    """cpu, cuda, cuda:N or fake."""
    dtype: str = "auto"
    """auto: float32 on cpu, the checkpoint's elsewhere."""
    load_format: str = "auto"
    max_model_len: int | None = None
    """Tokens, prompt + output; default: the model's, cut to what the KV cache can hold."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    """Tokens a step, decode rows included; default: 2048, and 8192 where prefill has a lane of its own and a long chunk
    holds up nobody."""
    page_size: int = 16
    """Tokens a KV page (vLLM's --block-size)."""
    kv_cache_memory: int | None = None
    """Bytes; default: 1 GiB on cpu, what gpu_memory_utilization leaves on cuda."""
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    async_depth: int = 2
    """Plans in flight, 1 to 3."""
    max_queue: int = 4096
    """Sequences waiting at once."""
    tensor_parallel_size: int = 1
    decode_overlap: str = "off"
    decode_sms: int | None = None
    staged_inputs: str = "on"
    itl_target_ms: float | None = None
    """With auto: what a decode step may take while prompts are computed; default: twice its lone pace."""
    ttft_target_ms: float | None = None
    """With auto: when prompts would wait longer than this, decode steps may take longer than their target; default:
    400 without an ITL target (a lone prompt on the prefill lane takes what it takes), never with one."""
    threads: int | None = None
    """CPU threads of a worker; default: the cores this process may use."""
    gpu_wait_timeout: float = 60.0
    """Seconds that one step may take on the worker before it aborts."""
    worker_timeout: float = 5.0
    """Seconds of silence (no heartbeat) after which a worker counts as frozen and is killed."""
    start_timeout: float = 600.0
    """Seconds for workers to load the model."""
    worker_address: str | None = None
    """unix: path to listen on for workers started by hand (`greenlane worker`); default: the core starts its own."""
    crash_dir: str | None = None
    step_log: str | None = None
    """File to which the worker appends what it did when, for `greenlane trace`."""
    address: str = "127.0.0.1:0"
    """`unix:/path` or `host:port` of gRPC. Port 0: any free one; the one bound is announced."""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    api_key_file: str | None = None
    insecure_listen: bool = False
    drain_timeout: float = 30.0
    """Seconds that open requests may take to finish after the first signal; then they are aborted."""
    otlp_traces_endpoint: str | None = None
    """http(s)://host:port of an OpenTelemetry collector (OTLP over gRPC)."""
    log_level: str = "info"

    @property
    def token_budget(self) -> int:
        """max_num_batched_tokens as it is in force."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return 2048 if self.decode_overlap == "off" else 8192

    @property
    def device_kind(self) -> str:
        return self.device.split(":", 1)[0]

    @property
    def access(self) -> Access:
        """What gRPC asks of its clients."""
        return Access(
            self.ssl_keyfile, self.ssl_certfile, self.ssl_ca_certs, self.api_key_file, insecure=self.insecure_listen
        )

    @property
    def socket_path(self) -> str | None:
        """Of gRPC on a unix socket; None: it has a host and a port."""
        return self.address.removeprefix("unix:") if self.address.startswith("unix:") else None

    def check(self) -> None:
        """Raise ConfigError for the first setting that can't be served, naming it and what would work."""
        _one_of("--device", self.device_kind, DEVICES)
        ordinal = self.device.partition(":")[2]
        if ":" in self.device and (self.device_kind != "cuda" or not ordinal.isdecimal() or len(ordinal) > 3):
            raise ConfigError(f"--device {self.device}: only cuda takes an ordinal, as in cuda:0")
        self._check_lanes()
        self._check_address()
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--load-format", self.load_format, LOAD_FORMATS)
        if self.tensor_parallel_size != 1:
            raise ConfigError("--tensor-parallel-size above 1 can't be served by this version; use 1")
        _within("--max-num-seqs", self.max_num_seqs, 1, 4096)
        _within("--max-num-batched-tokens", self.token_budget, 16, 1 << 20)
        if self.token_budget < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.token_budget}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}): every running sequence may decode one token a step"
            )
        _within("--page-size", self.page_size, 1, 256)
        _within("--async-depth", self.async_depth, 1, 3)
        _within("--max-queue", self.max_queue, 1, 1 << 20)
        if self.max_model_len is not None:
            _within("--max-model-len", self.max_model_len, 2, 1 << 20)
        if self.kv_cache_memory is not None:
            _within("--kv-cache-memory", self.kv_cache_memory, MIB, 1 << 50)
        if self.threads is not None:
            _within("--threads", self.threads, 1, 1024)
        if not 0.05 <= self.gpu_memory_utilization <= 0.98:
            raise ConfigError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; it must be from 0.05 to 0.98"
            )
        for flag, seconds in (
            ("--gpu-wait-timeout", self.gpu_wait_timeout),
            ("--worker-timeout", self.worker_timeout),
            ("--start-timeout", self.start_timeout),
        ):
            if not 0.5 <= seconds <= 86400:
                raise ConfigError(f"{flag} is {seconds}; it must be from 0.5 to 86400 seconds")
        if not 0 <= self.drain_timeout <= 3600:
            raise ConfigError(f"--drain-timeout is {self.drain_timeout}; it must be from 0 to 3600 seconds")

    def _check_lanes(self) -> None:
        _one_of("--staged-inputs", self.staged_inputs, STAGED_INPUTS)
        if self.staged_inputs != "on" and self.device_kind != "cuda":
            raise ConfigError("--staged-inputs off goes with --device cuda; other devices stage nothing")
        _one_of("--decode-overlap", self.decode_overlap, OVERLAP_MODES)
        if self.decode_overlap != "off" and self.device_kind == "cpu":
            raise ConfigError(f"--decode-overlap {self.decode_overlap} needs --device cuda (or fake); on cpu use off")
        if self.decode_sms is not None and self.decode_overlap not in ("green", "auto"):
            raise ConfigError("--decode-sms goes with --decode-overlap green or auto; the other modes share all SMs")
        for flag, target in (("--itl-target-ms", self.itl_target_ms), ("--ttft-target-ms", self.ttft_target_ms)):
            if target is None:
                continue
            if self.decode_overlap != "auto":
                raise ConfigError(f"{flag} goes with --decode-overlap auto; the other modes follow no target")
            if not 0.1 <= target <= 600_000:
                raise ConfigError(f"{flag} is {target}; it must be from 0.1 to 600000 milliseconds")

    def _check_address(self) -> None:
        path, guards = self.socket_path, self.access
        if path is not None:
            if not path.startswith("/"):
                raise ConfigError(f"--address is {self.address!r}; a socket is written unix:/path")
            if guards != Access(insecure=guards.insecure):
                raise ConfigError("--ssl-… and --api-key-file go with --address host:port; a socket's folder guards it")
            return
        place = split_address(self.address)
        if place is None:
            raise ConfigError(f"--address is {self.address!r}; it must be unix:/path or host:port")
        try:
            guards.check("--address", place[0])
        except AccessError as error:
            raise ConfigError(str(error)) from error


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the core tells a worker in the handshake; already checked."""

    model: str
    """A folder."""
    device: str
    dtype: str
    load_format: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    kv_cache_memory: int | None
    gpu_memory_utilization: float
    async_depth: int
    decode_overlap: str
    decode_sms: int | None
    threads: int | None
    gpu_wait_timeout: float
    crash_dir: str | None
    step_log: str | None = None
    """Absolute path."""
    staged_inputs: str = "on"


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} is {value!r}; it must be one of {', '.join(allowed)}")


def _within(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{flag} is {value}; it must be from {low} to {high}")
