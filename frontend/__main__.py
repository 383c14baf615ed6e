"""`python -P -m frontend FLAGS`: the command line of one frontend process.

Owns its flags and their checks. Imports nothing heavy before they have passed.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from access.policy import AccessError, bare_host, check_in_the_clear, is_loopback, split_address
from frontend.config import ConfigError, FrontendConfig, Place, Supervision
from telemetry.output import flush_or_forget

LOG_LEVELS = ("debug", "info", "warning", "error")
PR_SET_PDEATHSIG = 1
REFUSED = 2
FLAGS: tuple[tuple[str, type | None, str, str], ...] = (
    ("model", str, "MODEL", "folder with tokenizer.json, or a repository id"),
    (
        "engine_address",
        str,
        "ADDRESS",
        "unix:/path or host:port of the engine core; of several, separated by commas",
    ),
    ("served_model_name", str, "NAME", "names that requests use; default: the model as given"),
    ("host", str, "ADDRESS", "address of HTTP and gRPC"),
    ("port", int, "PORT", "HTTP port; 0: any free one"),
    ("grpc_port", int, "PORT", "text gRPC port; 0: any free one"),
    (
        "vllm_grpc_port",
        int,
        "PORT",
        "VllmEngine gRPC port, for gateways like smg; 0: any free one; default: not served",
    ),
    ("vllm_grpc_host", str, "ADDRESS", "address of VllmEngine gRPC, which knows neither TLS nor tokens"),
    ("max_body_bytes", int, "BYTES", "largest HTTP body or gRPC message"),
    ("engine_timeout", float, "SECONDS", "seconds of silence after which the engine core counts as frozen"),
    ("request_timeout", float, "SECONDS", "deadline in seconds of requests that bring none; default: none"),
    ("ssl_keyfile", str, "FILE", "PEM key of the certificate; read again when it changes"),
    ("ssl_certfile", str, "FILE", "PEM certificate of HTTP and gRPC, its chain behind it"),
    ("ssl_ca_certs", str, "FILE", "PEM certificates; clients must show one that these signed"),
    (
        "api_key_file",
        str,
        "FILE",
        "file of bearer tokens, one a line; calls must bring one; read again when it changes",
    ),
    ("insecure_listen", None, "", "listen beyond this machine without TLS, tokens or client certificates"),
    ("engine_tls_ca_certs", str, "FILE", "PEM certificates that signed the engine core's: speak TLS with it"),
    ("engine_tls_certfile", str, "FILE", "PEM certificate to show to the engine core"),
    ("engine_tls_keyfile", str, "FILE", "PEM key of that certificate"),
    ("engine_api_key_file", str, "FILE", "file whose first bearer token is sent to the engine core"),
    ("drain_timeout", float, "SECONDS", "seconds for open requests to finish after SIGTERM; then they are cut off"),
    ("otlp_traces_endpoint", str, "URL", "http://host:port of an OpenTelemetry collector; default: no traces"),
    ("log_level", str, "LEVEL", ", ".join(LOG_LEVELS)),
)
"""Fields of FrontendConfig as flags: the field, what parses its value (None: a switch with a --no- form), what the help
calls the value (empty for a switch), and its text. A field whose default is an empty tuple takes several values."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(arguments: Sequence[str]) -> int:
    """Run the frontend that the flags describe to its end; the exit status."""
    try:
        options = parser().parse_args(arguments)
        if options.ready_fd is not None or options.parent_pid is not None:
            die_with_parent(options.parent_pid or os.getppid())
        config = read_config(options)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return REFUSED
    if options.check_flags:
        return _check_files(config)
    from frontend.log import configure
    from frontend.process import run

    configure(config.log_level)
    return run(config, _supervision(options))


def _supervision(options: argparse.Namespace) -> Supervision:
    place = Place(options.place, options.places, options.peers)
    return Supervision(options.ready_fd, options.alive_fd, options.engine_restarts, place)


def _check_files(config: FrontendConfig) -> int:
    """Whether certificates and keys can be served, and traces sent; the exit status."""
    files = (config.api_key_file, config.engine_tls_ca_certs, config.engine_api_key_file)
    if config.access.tls or any(files) or config.otlp_traces_endpoint is not None:
        from frontend.guards import Guards
        from frontend.process import spans

        try:
            Guards.load(config)
            spans(config).close()
        except ConfigError as error:
            sys.stderr.write(f"error: {error}\n")
            return REFUSED
    return 0


def parser() -> argparse.ArgumentParser:
    """The fields of FrontendConfig as flags, and what only a supervisor says."""
    out = Parser(
        prog="greenlane frontend",
        usage="greenlane frontend --model MODEL --engine-address ADDRESS [FLAGS]",
        description="OpenAI HTTP and text gRPC.",
        allow_abbrev=False,
    )
    defaults = {field.name: field.default for field in dataclasses.fields(FrontendConfig)}
    for name, kind, metavar, text in FLAGS:
        _add(out, f"--{name.replace('_', '-')}", defaults[name], kind, metavar, text)
    out.add_argument("--check-flags", action="store_true", help="check the flags, start nothing")
    _add_for_supervisors(out.add_argument_group("for whoever starts and watches it"))
    return out


def _add(out: argparse.ArgumentParser, flag: str, default: object, kind: type | None, metavar: str, text: str) -> None:
    if kind is None:
        out.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
    elif default == ():
        out.add_argument(flag, action="extend", type=kind, nargs="+", default=[], metavar=metavar, help=text)
    elif default is dataclasses.MISSING:
        out.add_argument(flag, type=kind, required=True, metavar=metavar, help=text)
    else:
        shown = "" if default is None else f" (default: {default})"
        out.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + shown)


def _add_for_supervisors(out: argparse._ArgumentGroup) -> None:
    out.add_argument("--ready-fd", type=int, metavar="FD", help="gets one JSON line once requests are served")
    out.add_argument("--alive-fd", type=int, metavar="FD", help="gets the time of a monotonic clock every second")
    out.add_argument("--parent-pid", type=int, metavar="PID", help="process without which this one must not live")
    out.add_argument("--engine-restarts", action="store_true", help="a lost engine core is started again by somebody")
    out.add_argument(
        "--peers", metavar="FOLDER", help="private folder for the sockets of frontends that share these ports"
    )
    out.add_argument("--place", type=int, default=1, metavar="N", help="which of these it is, from 1")
    out.add_argument("--places", type=int, default=1, metavar="N", help="how many there are")


def read_config(options: argparse.Namespace) -> FrontendConfig:
    """The checked settings; raises ConfigError naming the flag and what would work."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(FrontendConfig)}
    values["served_model_name"] = tuple(options.served_model_name)
    values |= {name: bare_host(values[name]) for name in ("host", "vllm_grpc_host")}
    config = FrontendConfig(**values)
    _check_ports({"--port": config.port, "--grpc-port": config.grpc_port, "--vllm-grpc-port": config.vllm_grpc_port})
    if not 1024 <= config.max_body_bytes <= 1 << 30:
        raise ConfigError(f"--max-body-bytes is {config.max_body_bytes}; it must be from 1024 to {1 << 30}")
    for flag, seconds in (("--engine-timeout", config.engine_timeout), ("--request-timeout", config.request_timeout)):
        if seconds is not None and not 0.5 <= seconds <= 86400:
            raise ConfigError(f"{flag} is {seconds}; it must be from 0.5 to 86400 seconds")
    if not 0 <= config.drain_timeout <= 3600:
        raise ConfigError(f"--drain-timeout is {config.drain_timeout}; it must be from 0 to 3600 seconds")
    if config.log_level not in LOG_LEVELS:
        raise ConfigError(f"--log-level is {config.log_level!r}; it must be one of {', '.join(LOG_LEVELS)}")
    if "" in config.served_model_name:
        raise ConfigError("--served-model-name is empty")
    try:
        config.access.check("--host", config.host)
    except AccessError as error:
        raise ConfigError(str(error)) from error
    if not (is_loopback(config.vllm_grpc_host) or config.insecure_listen):
        raise ConfigError(
            f"--vllm-grpc-host {config.vllm_grpc_host} is not loopback, and VllmEngine's gateways know neither TLS nor "
            "tokens: keep it on this machine, or say --insecure-listen on a network that is private"
        )
    _check_engine(config)
    return config


def _check_ports(ports: Mapping[str, int | None]) -> None:
    """Raise ConfigError unless the ports by flag are ones, and no two the same."""
    taken: dict[int, str] = {}
    for flag, port in ports.items():
        if port is None:
            continue
        if not 0 <= port <= 65535:
            raise ConfigError(f"{flag} is {port}; it must be from 0 to 65535")
        if port and port in taken:
            raise ConfigError(f"{taken[port]} and {flag} are both {port}; they must differ")
        taken[port] = flag


def _check_engine(config: FrontendConfig) -> None:
    """Where the engine core is, and what is shown to it."""
    addresses = config.engine_address.split(",")
    for address in addresses:
        place = split_address(address)
        if not address.startswith("unix:/") and (place is None or place[0] == "unix" or place[1] == 0):
            raise ConfigError(f"--engine-address is {address!r}; it must be unix:/path or host:port")
    if len(set(addresses)) < len(addresses):
        raise ConfigError("--engine-address names an engine core twice")
    if (config.engine_tls_keyfile is None) != (config.engine_tls_certfile is None):
        raise ConfigError("--engine-tls-certfile and --engine-tls-keyfile go together")
    if config.engine_tls_certfile is not None and config.engine_tls_ca_certs is None:
        raise ConfigError("--engine-tls-certfile needs --engine-tls-ca-certs too")
    guards = (config.engine_tls_ca_certs, config.engine_api_key_file)
    if any(address.startswith("unix:") for address in addresses) and guards != (None, None):
        raise ConfigError("--engine-tls-… and --engine-api-key-file go with --engine-address host:port")
    if config.engine_api_key_file is not None and config.engine_tls_ca_certs is None and not config.insecure_listen:
        for address in addresses:
            _check_in_the_clear(address)


def _check_in_the_clear(address: str) -> None:
    try:
        check_in_the_clear("--engine-api-key-file", address, "--engine-tls-ca-certs makes it TLS")
    except AccessError as error:
        raise ConfigError(str(error)) from error


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent dies; exits at once if that has happened."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    flush_or_forget()
    sys.exit(status)
