"""The engine core's gRPC server: its options, its services, its address and who may call.

Owns the listening side of gRPC. What the calls do is `service.py`'s and `health.py`'s; what guards them, `access`'s.
"""

from __future__ import annotations

import grpc
import grpc.aio
from greenlane.engine.v1 import engine_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from access.interceptor import interceptors
from access.keys import KeyFile
from access.policy import Access, AccessError
from access.tls import server_credentials
from engine_core.errors import ConfigError
from engine_core.health import Health
from engine_core.service import ENGINE_SERVICE, EngineService
from engine_core.session import MAX_MESSAGE_BYTES
from telemetry.tracing import Tracing, TracingError

MAX_CALLS = 1024
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a second listener
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def guards(access: Access) -> tuple[grpc.ServerCredentials | None, KeyFile | None]:
    """What the server shows and asks for. Raises ConfigError for files that can't be served."""
    try:
        credentials = server_credentials(access) if access.tls else None
        keys = KeyFile("--api-key-file", access.api_key_file) if access.api_key_file is not None else None
    except AccessError as error:
        raise ConfigError(str(error)) from error
    return credentials, keys


def tracing(endpoint: str) -> Tracing:
    """Where the engine core's spans go. Raises ConfigError."""
    try:
        return Tracing(endpoint, "greenlane-engine")
    except TracingError as error:
        raise ConfigError(str(error)) from error


def build_server(service: EngineService, health: Health, keys: KeyFile | None = None) -> grpc.aio.Server:
    """A server with the engine, health and reflection services, not yet bound or started.

    With `keys`, every call but health's needs one of them.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS, interceptors=interceptors(keys))
    engine_pb2_grpc.add_EngineServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (ENGINE_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind `unix:/path` (claimed before) or host:port (0: any free one), with TLS where there are credentials.

    The address as clients write it. Raises ConfigError when it can't be had.
    """
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"can't listen on {address}: it is in use or not this machine's; choose another --address"
        ) from error
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{bound}"
