"""TLS of listeners and channels, from PEM files that may be replaced while the server runs.

Owns the SSL context of HTTP and the credentials of gRPC. A handshake uses the files as they are then; where they don't
fit together (a key and its certificate are replaced one after the other), the previous ones stay and the log says so.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from access.files import FreshFiles
from access.policy import Access, AccessError

log = logging.getLogger(__name__)

Made = TypeVar("Made")


class _Latest(Generic[Made]):
    """What was made from some files most recently, and made again when they change."""

    def __init__(self, files: FreshFiles, make: Callable[[], Made]) -> None:
        """Raises AccessError when nothing can be made of the files."""
        self._files = files
        self._make = make
        self._files.changed()
        self.made = make()

    def refresh(self) -> bool:
        """Whether there is a newer one."""
        if not self._files.changed():
            return False
        try:
            self.made = self._make()
        except AccessError as error:
            log.error("the certificates in use stay: %s", error)
            return False
        log.info("certificates were read again")
        return True


def http_context(access: Access) -> ssl.SSLContext:
    """The context of an HTTPS listener. Raises AccessError for files that can't be served."""
    latest = _Latest(_files(access), lambda: _load(access))
    context = _load(access)

    def choose(connection: Any, name: str | None, asked: ssl.SSLContext) -> None:
        """OpenSSL calls this at every hello, with or without a server name."""
        latest.refresh()
        connection.context = latest.made

    context.sni_callback = choose
    return context


def server_credentials(access: Access) -> grpc.ServerCredentials:
    """The credentials of a gRPC listener. Raises AccessError for files that can't be served."""
    latest = _Latest(_files(access), lambda: _configuration(access))

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this before every handshake; None: those in use, which it need not read in again."""
        return latest.made if latest.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        latest.made,
        newer,  # type: ignore[arg-type]  # the stubs don't know that it may say None
        access.ca_certs is not None,
    )


def channel_credentials(
    prefix: str, ca_certs: str, certfile: str | None, keyfile: str | None
) -> grpc.ChannelCredentials:
    """The credentials of a client, from the files as they are now; `prefix` begins the flags they came with.

    Raises AccessError for files that can't be read, or don't go together.
    """
    named = [(f"{prefix}-ca-certs", ca_certs)]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # gRPC would accept any bytes and fail at every handshake
    if certfile is not None and keyfile is not None:
        named += [(f"{prefix}-keyfile", keyfile), (f"{prefix}-certfile", certfile)]
    roots, *pair = FreshFiles(named).read()
    if certfile is not None and keyfile is not None:
        _load_pair(context, (f"{prefix}-certfile", certfile), (f"{prefix}-keyfile", keyfile))
    _load_authorities(context, f"{prefix}-ca-certs", ca_certs)
    return grpc.ssl_channel_credentials(roots, *pair)


def _files(access: Access) -> FreshFiles:
    named = [("--ssl-keyfile", access.keyfile), ("--ssl-certfile", access.certfile)]
    named.append(("--ssl-ca-certs", access.ca_certs))
    return FreshFiles([(flag, path) for flag, path in named if path is not None])


def _load(access: Access) -> ssl.SSLContext:
    assert access.keyfile is not None
    assert access.certfile is not None
    _files(access).read()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, ("--ssl-certfile", access.certfile), ("--ssl-keyfile", access.keyfile))
    if access.ca_certs is not None:
        _load_authorities(context, "--ssl-ca-certs", access.ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session shows no certificate again: one that is taken away would get in for hours more. TLS 1.3
        # resumes by tickets alone; the sessions that OpenSSL keeps for 1.2 can't be turned off from here.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
    return context


def _load_pair(context: ssl.SSLContext, certfile: tuple[str, str], keyfile: tuple[str, str]) -> None:
    """Flags and files. Raises AccessError."""
    try:
        # a password would be asked for on the terminal: an encrypted key is refused instead
        context.load_cert_chain(certfile[1], keyfile[1], password=lambda: "")
    except (ssl.SSLError, OSError) as error:
        raise AccessError(
            f"{' '.join(certfile)} and {' '.join(keyfile)} are no pair that can be served: they must be PEM, belong "
            f"together and not be encrypted ({_reason(error)})"
        ) from error


def _load_authorities(context: ssl.SSLContext, flag: str, file: str) -> None:
    """Raises AccessError."""
    try:
        context.load_verify_locations(file)
    except (ssl.SSLError, OSError) as error:
        raise AccessError(f"{flag} {file} holds no PEM certificates") from error


def _configuration(access: Access) -> grpc.ServerCertificateConfiguration:
    """For gRPC, which would accept any bytes and fail at every handshake: so OpenSSL is asked first."""
    _load(access)
    key, chain, *roots = _files(access).read()
    return grpc.ssl_server_certificate_configuration([(key, chain)], roots[0] if roots else None)


def _reason(error: OSError) -> str:
    return (isinstance(error, ssl.SSLError) and error.reason) or error.strerror or type(error).__name__
