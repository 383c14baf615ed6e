"""Command lines of the engine core's processes: `engine` and `worker`.

Owns the flags and their checks. Imports neither torch nor grpc nor zmq until something is really started, so that
`--help` and `--check-flags` are quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from engine_core.config import EngineConfig
from engine_core.errors import ConfigError
from engine_core.log import LEVELS
from engine_core.model_config import ModelConfig, load_model_config
from engine_core.model_files import CONFIG_FILES, SERVED_FILES, find_model

EXIT_REFUSED = 2
USAGE = "usage: python -P -m engine_core {engine,worker} [FLAGS]; --help after either says which\n"
UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("i", 1024), ("", 1000))
    for power, prefix in enumerate("KMGT", 1)
}


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One field of EngineConfig as a flag; `aliases` are other servers' names of the same thing."""

    field: str
    kind: Callable[[str], Any] | None
    """Parses the value; None: a switch with a --no- form."""
    metavar: str
    """What the help calls the value; empty for a switch."""
    help: str
    aliases: tuple[str, ...] = ()


def size(text: str) -> int:
    """Bytes: 1073741824, 1GiB, 1.5GiB, 512MiB, 4GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes or e.g. 4GiB, 512MiB")
    return int(float(match[1]) * unit)


FLAGS = (
    Flag("model", str, "MODEL", "folder with config.json, or a repository id"),
    Flag("device", str, "DEVICE", "cpu, cuda, cuda:N or fake"),
    Flag("dtype", str, "DTYPE", "auto, float32 or bfloat16; auto: float32 on cpu, the checkpoint's elsewhere"),
    Flag("load_format", str, "FORMAT", "auto, safetensors or dummy (random weights)"),
    Flag("max_model_len", int, "N", "tokens of prompt + output; default: the model's, cut to what the KV cache holds"),
    Flag("max_num_seqs", int, "N", "sequences running at once"),
    Flag("max_num_batched_tokens", int, "N", "tokens a step, decode rows included"),
    Flag("page_size", int, "N", "tokens a KV page", ("--block-size",)),
    Flag(
        "kv_cache_memory",
        size,
        "BYTES",
        "size of the KV cache, e.g. 4GiB; default on cpu: 1GiB",
        ("--kv-cache-memory-bytes",),
    ),
    Flag("gpu_memory_utilization", float, "FRACTION", "share of the GPU's memory for weights and KV cache"),
    Flag("enable_prefix_caching", None, "", "keep prompts' KV pages for later requests"),
    Flag("async_depth", int, "N", "steps in flight, 1 to 3"),
    Flag("max_queue", int, "N", "sequences waiting at once; more are refused"),
    Flag("tensor_parallel_size", int, "N", "workers that share the model", ("-tp",)),
    Flag("decode_overlap", str, "MODE", "lane of prefill beside decode: off, stream, green or auto"),
    Flag("decode_sms", int, "N", "SMs of decode while a prefill is in flight, for green and auto"),
    Flag(
        "itl_target_ms",
        float,
        "MS",
        "what a decode step may take beside prefill, for auto; default: twice what it takes alone",
    ),
    Flag(
        "ttft_target_ms",
        float,
        "MS",
        "how long prompts may wait before decode gives way, for auto; default: 400, for a lone one on the lane "
        "and with an ITL target never",
    ),
    Flag(
        "staged_inputs",
        str,
        "MODE",
        "on: the next step's inputs are filled while this one runs; off: only when it is over",
    ),
    Flag("threads", int, "N", "CPU threads of a worker; default: the cores it may use"),
    Flag("gpu_wait_timeout", float, "SECONDS", "seconds that one step may take on a worker"),
    Flag("worker_timeout", float, "SECONDS", "seconds of silence after which a worker counts as frozen"),
    Flag("start_timeout", float, "SECONDS", "seconds for a worker to load the model"),
    Flag("drain_timeout", float, "SECONDS", "seconds for open requests to finish after SIGTERM; then they are aborted"),
    Flag(
        "worker_address",
        str,
        "ADDRESS",
        "unix:/path to listen on for a worker started by hand; default: one is started",
    ),
    Flag("crash_dir", str, "FOLDER", "folder for crash reports; default: none are written"),
    Flag("step_log", str, "FILE", "file for what the worker did when (see greenlane trace); default: none is written"),
    Flag("address", str, "ADDRESS", "unix:/path or host:port of gRPC; port 0: any free one"),
    Flag("ssl_keyfile", str, "FILE", "PEM key of gRPC's certificate; read again when it changes"),
    Flag("ssl_certfile", str, "FILE", "PEM certificate of gRPC, its chain behind it"),
    Flag("ssl_ca_certs", str, "FILE", "PEM certificates; clients must show one that these signed"),
    Flag(
        "api_key_file",
        str,
        "FILE",
        "file of bearer tokens, one a line; calls must bring one; read again when it changes",
    ),
    Flag("insecure_listen", None, "", "listen beyond this machine without TLS, tokens or client certificates"),
    Flag("otlp_traces_endpoint", str, "URL", "http://host:port of an OpenTelemetry collector; default: no traces"),
    Flag("log_level", str, "LEVEL", ", ".join(LEVELS)),
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        refuse(message)
        raise SystemExit(EXIT_REFUSED)


def refuse(message: str) -> int:
    """Say on stderr why nothing was started; the exit status for that."""
    sys.stderr.write(f"error: {message}\n")
    return EXIT_REFUSED


def main(arguments: list[str]) -> int:
    """Run one process of the engine core to its end; the exit status."""
    if arguments[:1] == ["engine"]:
        return engine(arguments[1:])
    if arguments[:1] == ["worker"]:
        from engine_core.worker.worker import main as worker

        return worker(arguments[1:])
    sys.stderr.write(USAGE)
    return 0 if arguments[:1] in (["--help"], ["-h"]) else EXIT_REFUSED


def engine(arguments: list[str]) -> int:
    """`engine FLAGS`: check everything that can be checked without loading a model, then serve."""
    options = parser().parse_args(arguments)
    try:
        bind_to_parent(options.parent_pid, options.ready_fd)
        config = read_config(options)
        folder = find_model(config.model, CONFIG_FILES if options.check_flags else SERVED_FILES)
        model = check_model(config, folder)
        if options.check_checkpoint and config.load_format != "dummy":
            from engine_core.models.weights import check_checkpoint

            check_checkpoint(folder, model)
    except ConfigError as error:
        return refuse(str(error))
    if options.check_flags or options.check_checkpoint:
        return 0
    from engine_core.main import run

    return run(config, folder, model, options.ready_fd, options.alive_fd)


def parser() -> argparse.ArgumentParser:
    """Every field of EngineConfig as a flag, and what only a supervisor or a script says."""
    out = Parser(
        prog="greenlane engine",
        usage="greenlane engine --model MODEL [FLAGS]",
        description="Engine core: token ids over gRPC, one worker.",
        allow_abbrev=False,
    )
    defaults = {field.name: field for field in msgspec.structs.fields(EngineConfig)}
    for flag in FLAGS:
        names = (f"--{flag.field.replace('_', '-')}", *flag.aliases)
        default = defaults[flag.field].default
        shown = "" if default in (None, msgspec.NODEFAULT) else f" (default: {default})"
        if flag.kind is None:
            action = argparse.BooleanOptionalAction
            out.add_argument(*names, action=action, default=default, help=flag.help + shown)
        else:
            required = default is msgspec.NODEFAULT
            out.add_argument(
                *names,
                dest=flag.field,
                type=flag.kind,
                required=required,
                default=None if required else default,
                metavar=flag.metavar,
                help=flag.help + shown,
            )
    out.add_argument("--check-flags", action="store_true", help="check flags and model configuration, start nothing")
    out.add_argument("--check-checkpoint", action="store_true", help="as --check-flags, and the headers of its weights")
    watcher = out.add_argument_group("for whoever starts and watches it")
    watcher.add_argument("--ready-fd", type=int, metavar="FD", help="gets one JSON line once the engine serves")
    watcher.add_argument("--alive-fd", type=int, metavar="FD", help="gets the time of a monotonic clock every second")
    watcher.add_argument("--parent-pid", type=int, metavar="PID", help="process without which this one must not live")
    return out


def read_config(options: argparse.Namespace) -> EngineConfig:
    """The checked settings; raises ConfigError."""
    config = EngineConfig(**{flag.field: getattr(options, flag.field) for flag in FLAGS})
    config.check()
    if config.log_level not in LEVELS:
        raise ConfigError(f"--log-level is {config.log_level!r}; it must be one of {', '.join(LEVELS)}")
    if config.worker_address is not None and not config.worker_address.startswith("unix:/"):
        raise ConfigError(f"--worker-address is {config.worker_address!r}; it must be unix:/path")
    if config.crash_dir is not None:
        make_crash_dir(Path(config.crash_dir))
    if config.step_log is not None:
        check_step_log(Path(config.step_log))
    check_guards(config)
    if config.otlp_traces_endpoint is not None:
        from engine_core.server import tracing

        tracing(config.otlp_traces_endpoint).close()
    return config


def make_crash_dir(folder: Path) -> None:
    """Reports must find it when it is too late to say that they can't be written. Raises ConfigError."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--crash-dir {folder} is no folder")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--crash-dir {folder} can't be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--crash-dir {folder} can't be written to by this user")


def check_guards(config: EngineConfig) -> None:
    """Raise ConfigError for certificates or keys that can't be served."""
    if not (config.access.tls or config.api_key_file):
        return
    from engine_core.server import guards

    guards(config.access)


def check_step_log(path: Path) -> None:
    """Raise ConfigError for a path at which no file can stand."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"--step-log {path}: {folder} is no folder; make it first")
    if path.is_dir():
        raise ConfigError(f"--step-log {path} is a folder; name a file in it")


def check_model(config: EngineConfig, folder: Path) -> ModelConfig:
    """The model's configuration, where these settings fit it; raises ConfigError."""
    model = load_model_config(folder)
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is beyond the model's context of {model.max_position} tokens"
        )
    return model


def bind_to_parent(parent_pid: int | None, ready_fd: int | None) -> None:
    """Die with the parent: with the one named, or with the one that waits at the other end of the ready pipe."""
    if parent_pid is None and ready_fd is None:
        return
    from engine_core.executor.processes import die_with_parent

    die_with_parent(os.getppid() if parent_pid is None else parent_pid)
    if ready_fd is not None:
        poller = select.poll()
        try:
            poller.register(ready_fd, 0)
            broken = poller.poll(0)
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"--ready-fd {ready_fd} is no open descriptor") from error
        if broken:  # no reader, or not open: whoever started this process is gone
            raise ConfigError(f"--ready-fd {ready_fd} has no reader any more")
