"""What guards a frontend's listeners, and what it shows to its engine core: certificates and keys, loaded once, fresh
ever after.

Owns which file guards what. How a key or a certificate is checked is `access`'s.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from access import tls
from access.keys import KeyFile
from access.policy import AccessError
from frontend.config import ConfigError, FrontendConfig
from frontend.engine_calls import Metadata
from frontend.engine_channel import CHANNEL_OPTIONS, open_channel


@dataclass(frozen=True, slots=True)
class Guards:
    """Of one frontend process; None: there is no such guard."""

    http_tls: ssl.SSLContext | None
    grpc_tls: grpc.ServerCredentials | None
    keys: KeyFile | None
    connect: Callable[[str], grpc.aio.Channel]
    """Opens a channel to the engine core."""
    engine_metadata: Callable[[], Metadata]
    """Of every call to the engine core."""

    @classmethod
    def load(cls, config: FrontendConfig) -> Guards:
        """Raises ConfigError for files that can't be served."""
        access = config.access
        try:
            return cls(
                http_tls=tls.http_context(access) if access.tls else None,
                grpc_tls=tls.server_credentials(access) if access.tls else None,
                keys=None if access.api_key_file is None else KeyFile("--api-key-file", access.api_key_file),
                connect=_connect(config),
                engine_metadata=_metadata(config.engine_api_key_file),
            )
        except AccessError as error:
            raise ConfigError(str(error)) from error


def _connect(config: FrontendConfig) -> Callable[[str], grpc.aio.Channel]:
    """Every connection reads the files again. Raises AccessError for files that can't be read now."""
    ca_certs = config.engine_tls_ca_certs
    if ca_certs is None:
        return open_channel

    def credentials() -> grpc.ChannelCredentials:
        return tls.channel_credentials("--engine-tls", ca_certs, config.engine_tls_certfile, config.engine_tls_keyfile)

    credentials()
    return lambda address: grpc.aio.secure_channel(address, credentials(), options=CHANNEL_OPTIONS)


def _metadata(key_file: str | None) -> Callable[[], Metadata]:
    if key_file is None:
        return lambda: ()
    keys = KeyFile("--engine-api-key-file", key_file)
    return lambda: (("authorization", keys.bearer()),)
