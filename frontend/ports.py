"""The ports of `greenlane serve`: found free before anything is loaded, and shared where there are several frontends.

Owns the list of a frontend's listeners. Serves nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from access.policy import bare_host
from frontend.cli_flags import Value, default_of
from frontend.config import ConfigError


@dataclass(frozen=True, slots=True)
class Listener:
    """One of a frontend's listeners."""

    kind: str
    """Its name in what a frontend announces."""
    spoken: str
    port: str
    """Key of the flag with its port …"""
    host: str
    """… and with its address."""

    @property
    def flag(self) -> str:
        return f"--{self.port.replace('_', '-')}"

    def served(self, values: Mapping[str, Value]) -> bool:
        """Whether frontends with these flags have it: VllmEngine's is off by default."""
        return self.kind != "vllm" or self.port in values

    def address(self, values: Mapping[str, Value]) -> str:
        """Where frontends with these flags have it, without a port."""
        return bare_host(str(values.get(self.host, default_of(self.host))))


LISTENERS = (
    Listener("http", "OpenAI API", "port", "host"),
    Listener("grpc", "text gRPC", "grpc_port", "host"),
    Listener("vllm", "VllmEngine gRPC", "vllm_grpc_port", "vllm_grpc_host"),
)


def check_port(host: str, flag: str, port: int) -> None:
    """Raise ConfigError for a port that is taken now; the process that is to have it binds it later all the same."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{flag} {port}: {os.strerror(error.errno or 0).lower()}; choose others with "
                f"{', '.join(each.flag for each in LISTENERS)}"
            ) from error


def share_ports(values: Mapping[str, Value], held: contextlib.ExitStack) -> dict[str, Value]:
    """The ports that all frontends of this server listen on, by key of their flags; 0 becomes a free one.

    They stay reserved as long as `held` does, by sockets that share them and don't listen: the kernel hands connections
    to listening frontends alone, and nobody else gets a port while a frontend is being restarted. Raises ConfigError.
    """
    out: dict[str, Value] = {}
    for each in LISTENERS:
        if each.served(values):
            host, port = each.address(values), str(values[each.port] if each.port in values else default_of(each.port))
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            holder = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                holder.bind((host, int(port)))
            except OSError as error:
                raise ConfigError(f"{each.flag} {port} can't be had on {host}: {error.strerror}") from error
            out[each.port] = str(holder.getsockname()[1])
    return out
