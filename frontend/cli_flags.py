"""The flags of `greenlane serve` as a table, and how they become the command lines of its processes.

Owns names, help texts and who gets which flag; a test compares the table with the processes' own parsers. Checks no
value: each process does that itself (`--check-flags`), before anything is started.
"""

from __future__ import annotations

import enum
import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from frontend.config import ConfigError

Value = str | bool | list[str]
"""A flag's value as text, a switch, or a repeated flag's values."""


class To(enum.Flag):
    """Which process takes a flag."""

    ENGINE = enum.auto()
    FRONTEND = enum.auto()
    SERVE = enum.auto()


ALL = To.ENGINE | To.FRONTEND


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    """Without the dashes in front."""
    to: To
    panel: str
    help: str
    metavar: str | None = None
    """None: a switch, with a --no- form."""
    default: str | None = None
    """As shown in the help; None: the help text says what happens without the flag."""
    repeated: bool = False
    aliases: tuple[str, ...] = ()
    """Other servers' names of the same thing, with their dashes."""

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


FLAGS = (
    Flag("model", ALL, "Model", "Folder with config.json, tokenizer.json and safetensors, or a repository id", "MODEL"),
    Flag(
        "served-model-name",
        To.FRONTEND,
        "Model",
        "Name that requests use, may be repeated; default: the model as given",
        "NAME",
        repeated=True,
    ),
    Flag("dtype", To.ENGINE, "Model", "auto, float32 or bfloat16; auto: float32 on cpu", "DTYPE", "auto"),
    Flag("load-format", To.ENGINE, "Model", "auto, safetensors or dummy (random weights)", "FORMAT", "auto"),
    Flag(
        "max-model-len",
        To.ENGINE,
        "Model",
        "Tokens of prompt + output; default: the model's, cut to what the KV cache holds",
        "N",
    ),
    Flag("device", To.ENGINE, "Engine", "cpu, cuda, cuda:N or fake", "DEVICE", "cpu"),
    Flag("threads", To.ENGINE, "Engine", "CPU threads of a worker; default: the cores it may use", "N"),
    Flag("max-num-seqs", To.ENGINE, "Engine", "Sequences running at once", "N", "256"),
    Flag(
        "max-num-batched-tokens",
        To.ENGINE,
        "Engine",
        "Tokens a step, decode rows included; default: 2048, with a prefill lane 8192",
        "N",
    ),
    Flag("max-queue", To.ENGINE, "Engine", "Sequences waiting at once; more are refused with 429", "N", "4096"),
    Flag("async-depth", To.ENGINE, "Engine", "Steps in flight, 1 to 3", "N", "2"),
    Flag("tensor-parallel-size", To.ENGINE, "Engine", "Workers that share the model", "N", "1", aliases=("-tp",)),
    Flag(
        "decode-overlap",
        To.ENGINE,
        "Engine",
        "Lane of prefill beside decode: off, stream, green or auto",
        "MODE",
        "off",
    ),
    Flag(
        "staged-inputs",
        To.ENGINE,
        "Engine",
        "On a GPU, fill the next step's inputs while this one runs: on or off",
        "MODE",
        "on",
    ),
    Flag("decode-sms", To.ENGINE, "Engine", "SMs of decode while a prefill is in flight, for green and auto", "N"),
    Flag(
        "itl-target-ms",
        To.ENGINE,
        "Engine",
        "What a decode step may take beside prefill, for auto; default: twice what it takes alone",
        "MS",
    ),
    Flag(
        "ttft-target-ms",
        To.ENGINE,
        "Engine",
        "How long prompts may wait before decode gives way, for auto; default: 400, for a lone one on the lane and "
        "with an ITL target never",
        "MS",
    ),
    Flag(
        "kv-cache-memory",
        To.ENGINE,
        "Memory",
        "Size of the KV cache, e.g. 4GiB; default on cpu: 1GiB",
        "BYTES",
        aliases=("--kv-cache-memory-bytes",),
    ),
    Flag(
        "gpu-memory-utilization",
        To.ENGINE,
        "Memory",
        "Share of the GPU's memory for weights and KV cache",
        "FRACTION",
        "0.9",
    ),
    Flag("page-size", To.ENGINE, "Memory", "Tokens a KV page", "N", "16", aliases=("--block-size",)),
    Flag(
        "enable-prefix-caching",
        To.ENGINE,
        "Memory",
        "Keep prompts' KV pages for later requests, unless --no-enable-prefix-caching",
    ),
    Flag("host", To.FRONTEND, "Server", "Address of HTTP and text gRPC", "ADDRESS", "127.0.0.1"),
    Flag("port", To.FRONTEND, "Server", "HTTP port; 0: any free one", "PORT", "8000"),
    Flag("grpc-port", To.FRONTEND, "Server", "Text gRPC port; 0: any free one", "PORT", "50051"),
    Flag(
        "vllm-grpc-port",
        To.FRONTEND,
        "Server",
        "VllmEngine gRPC port, for gateways like smg; 0: any free one; default: not served",
        "PORT",
    ),
    Flag(
        "vllm-grpc-host",
        To.FRONTEND,
        "Server",
        "Address of VllmEngine gRPC, which knows neither TLS nor tokens",
        "ADDRESS",
        "127.0.0.1",
    ),
    Flag(
        "frontends",
        To.SERVE,
        "Server",
        "Frontend processes, which share the ports",
        "N",
        "1",
    ),
    Flag(
        "engine-address",
        To.SERVE,
        "Server",
        "Where the engine core listens: unix:/path or host:port on loopback; default: a socket in a private folder",
        "ADDRESS",
    ),
    Flag("max-body-bytes", To.FRONTEND, "Server", "Largest HTTP body", "BYTES", str(32 << 20)),
    Flag("ssl-keyfile", To.FRONTEND, "Security", "PEM key of the certificate; read again when it changes", "FILE"),
    Flag("ssl-certfile", To.FRONTEND, "Security", "PEM certificate of HTTP and gRPC, its chain behind it", "FILE"),
    Flag("ssl-ca-certs", To.FRONTEND, "Security", "Clients must show a certificate that these signed (PEM)", "FILE"),
    Flag(
        "api-key-file",
        To.FRONTEND,
        "Security",
        "Bearer tokens, one a line, of which calls must bring one; read again when it changes",
        "FILE",
    ),
    Flag(
        "insecure-listen",
        To.FRONTEND,
        "Security",
        "Listen beyond this machine without TLS, tokens or client certificates; default: refuse to",
    ),
    Flag("request-timeout", To.FRONTEND, "Server", "Deadline of requests that bring none; default: none", "SECONDS"),
    Flag("engine-timeout", To.FRONTEND, "Failures", "Silence after which the core counts as frozen", "SECONDS", "5.0"),
    Flag("worker-timeout", To.ENGINE, "Failures", "Silence after which a worker counts as frozen", "SECONDS", "5.0"),
    Flag("gpu-wait-timeout", To.ENGINE, "Failures", "Bound of one step on a worker", "SECONDS", "60.0"),
    Flag("start-timeout", To.ENGINE, "Failures", "Bound of loading the model", "SECONDS", "600.0"),
    Flag(
        "drain-timeout",
        ALL | To.SERVE,
        "Failures",
        "Bound of finishing open requests after SIGTERM or Ctrl-C",
        "SECONDS",
        "30.0",
    ),
    Flag("crash-dir", To.ENGINE, "Failures", "Folder for crash reports; default: none are written", "FOLDER"),
    Flag(
        "step-log",
        To.ENGINE,
        "Failures",
        "File for what the worker did when, see greenlane trace; default: none",
        "FILE",
    ),
    Flag(
        "otlp-traces-endpoint",
        ALL,
        "Failures",
        "http://host:port of an OpenTelemetry collector (OTLP over gRPC); default: no traces",
        "URL",
    ),
    Flag("log-level", ALL, "Failures", "debug, info, warning or error", "LEVEL", "info"),
)


def default_of(key: str) -> str:
    """The default of a flag that has one, as text."""
    (default,) = (flag.default for flag in FLAGS if flag.key == key and flag.default is not None)
    return default


def child_argv(values: Mapping[str, Value], to: To) -> list[str]:
    """The flags that one kind of process takes, as its command line. `values` maps keys of given flags."""
    argv: list[str] = []
    for flag in FLAGS:
        if to in flag.to and flag.key in values:
            argv += _render(flag, values[flag.key])
    return argv


def _render(flag: Flag, value: Value) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag.name}" if value else f"--no-{flag.name}"]
    items = value if isinstance(value, list) else [value]
    return [f"--{flag.name}={item}" for item in items]


def read_config_file(path: Path) -> dict[str, Value]:
    """Flags from a TOML file, `max-model-len = 4096`; raises ConfigError naming an unknown key or a wrong type."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config {path} can't be read: {reason}") from error
    known = {
        name: flag for flag in FLAGS for name in (flag.name, flag.key, *(each.lstrip("-") for each in flag.aliases))
    }
    values: dict[str, Value] = {}
    for name, item in data.items():
        if name not in known:
            switch = known.get(name.removeprefix("no-"))
            instead = "see `greenlane serve --help`"
            if switch is not None and switch.metavar is None:
                instead = f"write {switch.name} = false"
            raise ConfigError(f"--config {path}: {name!r} is no flag of `greenlane serve`; {instead}")
        if known[name].key in values:
            raise ConfigError(f"--config {path}: {known[name].name} stands there twice")
        values[known[name].key] = _from_toml(path, known[name], item)
    return values


def _from_toml(path: Path, flag: Flag, item: Any) -> Value:
    """The value in the form that a command line would give it."""
    if flag.metavar is None:
        if isinstance(item, bool):
            return item
        raise ConfigError(f"--config {path}: {flag.name} is a switch; write true or false")
    items = item if isinstance(item, list) and flag.repeated else [item]
    if any(isinstance(each, bool) or not isinstance(each, (str, int, float)) for each in items):
        kind = "text, a number or a list of them" if flag.repeated else "text or a number"
        raise ConfigError(f"--config {path}: {flag.name} must be {kind}")
    texts = [str(each) for each in items]
    return texts if flag.repeated else texts[0]


def takes_flags(run: Callable[[dict[str, Value], Path | None, int | None], None]) -> Callable[..., None]:
    """A typer command with every flag of the table, `--config` and a hidden `--ready-fd`, around `run(given, …)`."""
    config_flag = typer.Option("--config", metavar="FILE", help="TOML file of these flags; flags given here win")
    spellings = {spelling.key: spelling for spelling in SPELLINGS}
    parameters = [spelling.parameter() for spelling in SPELLINGS]
    parameters.append(_option("config", Path | None, config_flag))
    parameters.append(_option("ready_fd", int | None, typer.Option("--ready-fd", hidden=True)))

    def command(**arguments: Any) -> None:
        config, ready_fd = arguments.pop("config"), arguments.pop("ready_fd")
        chosen = [(spellings[key], value) for key, value in arguments.items() if value not in (None, [])]
        run(_given(chosen), config, ready_fd)

    command.__doc__ = run.__doc__
    # typer reads a command's options from its signature and annotations.
    command.__dict__["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way to write a flag. The help shows the first of them: with all, 80 columns would cut every name."""

    flag: Flag
    text: str
    shown: bool = False
    negative: bool = False
    """Of a switch: it is off."""

    @property
    def key(self) -> str:
        return self.text.strip("-").replace("-", "_")

    def parameter(self) -> inspect.Parameter:
        flag = self.flag
        option = typer.Option(
            self.text,
            metavar=flag.metavar,
            help=f"{flag.help} (default: {flag.default})" if flag.default else flag.help,
            rich_help_panel=flag.panel,
            hidden=not self.shown,
        )
        kind: Any = list[str] if flag.repeated else str if flag.metavar else bool
        return _option(self.key, kind | None, option)


def _spellings(flag: Flag) -> list[Spelling]:
    named = [Spelling(flag, f"--{flag.name}", shown=True), *(Spelling(flag, alias) for alias in flag.aliases)]
    return named if flag.metavar else [*named, Spelling(flag, f"--no-{flag.name}", negative=True)]


SPELLINGS = [spelling for flag in FLAGS for spelling in _spellings(flag)]


def _given(chosen: Sequence[tuple[Spelling, Value]]) -> dict[str, Value]:
    """The flags on a command line, by key. Refuses one that is written in two ways."""
    given: dict[str, Value] = {}
    for spelling, value in chosen:
        key = spelling.flag.key
        if key in given:
            raise typer.BadParameter(f"{spelling.text} is another word for --{spelling.flag.name}: give one of them")
        given[key] = not value if spelling.negative else value
    return given


def _option(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])
