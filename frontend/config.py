"""Settings of a frontend process, checked once, then frozen.

Owns the defaults. The engine core checks its own flags; this package never imports it.
"""

from __future__ import annotations

from dataclasses import dataclass

from access.policy import Access

MIB = 1 << 20


class ConfigError(Exception):
    """A flag or file that can't be served; the message names it and what would work."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which of a server's frontends this one is; places count from 1."""

    number: int = 1
    count: int = 1
    folder: str | None = None
    """Of the frontends' own sockets; None: there is no other frontend."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """What whoever started a frontend wants of it."""

    ready_fd: int | None = None
    """Gets one JSON line once requests are served."""
    alive_fd: int | None = None
    """Gets the monotonic clock's time, a float64, every second while the process is alive."""
    engine_restarts: bool = False
    """A lost engine core is started again."""
    place: Place = Place()


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """What `greenlane frontend` serves and where."""

    model: str
    """A folder with tokenizer.json, or a repository id that huggingface-hub has or may fetch."""
    engine_address: str
    """`unix:/path` or `host:port` of the engine core's gRPC server; several are separated by commas."""
    served_model_name: tuple[str, ...] = ()
    """Names that requests may use; default: the model as given. The first is the one reported."""
    host: str = "127.0.0.1"
    port: int = 8000
    """HTTP; 0: any free port."""
    grpc_port: int = 50051
    """Text gRPC; 0: any free port."""
    vllm_grpc_port: int | None = None
    """VllmEngine gRPC, for gateways; 0: any free port, None: not served."""
    vllm_grpc_host: str = "127.0.0.1"
    """Address of that listener alone: it is plain, since its clients know neither TLS nor tokens."""
    max_body_bytes: int = 32 * MIB
    engine_timeout: float = 5.0
    """Seconds of silence on the session after which the engine core counts as frozen."""
    request_timeout: float | None = None
    """Deadline of a request that brings none, in seconds."""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    api_key_file: str | None = None
    insecure_listen: bool = False
    engine_tls_ca_certs: str | None = None
    """PEM certificates that signed the engine core's; given, the session speaks TLS."""
    engine_tls_certfile: str | None = None
    engine_tls_keyfile: str | None = None
    """With the certificate: what the engine core is shown (mTLS)."""
    engine_api_key_file: str | None = None
    """Its first key is sent to the engine core."""
    drain_timeout: float = 30.0
    """Seconds that open requests may take to finish after the first signal; then they are cut off."""
    otlp_traces_endpoint: str | None = None
    """http(s)://host:port of an OpenTelemetry collector (OTLP over gRPC)."""
    log_level: str = "info"

    @property
    def access(self) -> Access:
        """What HTTP and text gRPC ask of their clients."""
        return Access(
            self.ssl_keyfile, self.ssl_certfile, self.ssl_ca_certs, self.api_key_file, insecure=self.insecure_listen
        )
