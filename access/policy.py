"""Who may reach a listener: the rule that nothing beyond this machine is served to strangers.

Owns the settings that guard a listener and what is wrong with them. Reads no file and opens no socket: `files.py`,
`tls.py` and `keys.py` do.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


class AccessError(Exception):
    """A setting that can't guard a listener; the message names the flag and what would work."""


@dataclass(frozen=True, slots=True)
class Access:
    """What a listener asks of its clients. File names; None: not asked for."""

    keyfile: str | None = None
    certfile: str | None = None
    """PEM chain that the listener shows; with it the listener speaks TLS."""
    ca_certs: str | None = None
    """PEM certificates; a client must show one that these signed (mTLS)."""
    api_key_file: str | None = None
    """Bearer tokens, one a line; every call must bring one."""
    insecure: bool = False
    """Listen beyond this machine all the same."""

    @property
    def tls(self) -> bool:
        return self.certfile is not None

    @property
    def guarded(self) -> bool:
        """Whether strangers are kept out and nobody can listen in."""
        return self.tls and (self.ca_certs is not None or self.api_key_file is not None)

    def check(self, flag: str, host: str) -> None:
        """Raise AccessError where these settings can't be served, or `host` (of `flag`) needs more of them."""
        if (self.keyfile is None) != (self.certfile is None):
            given, missing = ("key", "cert") if self.certfile is None else ("cert", "key")
            raise AccessError(f"--ssl-{given}file needs --ssl-{missing}file too")
        if self.ca_certs is not None and not self.tls:
            raise AccessError("--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile too")
        if not (is_loopback(host) or self.guarded or self.insecure):
            raise AccessError(
                f"{flag} {host} is not loopback, so it needs --ssl-certfile and --ssl-keyfile with --api-key-file "
                "(tokens) or --ssl-ca-certs (client certificates); --insecure-listen serves everybody without"
            )


def check_in_the_clear(flag: str, address: str, remedy: str) -> None:
    """Raise AccessError for a key that would go to `host:port` elsewhere without TLS."""
    place = split_address(address)
    if place is not None and not is_loopback(place[0]):
        raise AccessError(f"{flag}: the key would go to {place[0]} in the clear, for all on the way to read; {remedy}")


def is_loopback(host: str) -> bool:
    """Whether an address or name reaches this machine alone; `host` may stand in brackets."""
    try:
        return host == "localhost" or ipaddress.ip_address(bare_host(host)).is_loopback
    except ValueError:
        return False


def bare_host(host: str) -> str:
    """An IPv6 address without the brackets that it wears before a port, as sockets take it; others as they are."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of `host:port` or `[v6]:port`; None where it is neither."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed) or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        return None
    return host, int(port)
