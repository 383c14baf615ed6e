"""Bearer tokens: a file of keys, one a line, and whether a call brings one of them.

Owns the file's format and the comparison, which takes the same time whatever is given. Logs no key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re

from access.files import FreshFiles
from access.policy import AccessError

log = logging.getLogger(__name__)

MAX_KEYS = 1024
NO_KEY, UNKNOWN_KEY = "a key is needed: send", "the key isn't one of the server's: send another with"
"""What who is turned away hears, before the name of the header."""
_KEY = re.compile(rb"[!-~]{1,512}")
_BEARER = re.compile(rb"bearer +([!-~]{1,512}) *", re.IGNORECASE)


class KeyFile:
    """The keys of a file. Empty lines and lines that begin with # hold none; any of the others is accepted.

    The file is read again when it changed. A changed file that can't be read, or holds what is no key, accepts nobody
    until it is mended, and the log says so: who takes a key away must be able to rely on it.
    """

    def __init__(self, flag: str, path: str) -> None:
        """Raises AccessError for a file that can't be read now or holds no key."""
        self.refused = 0
        """Calls turned away for want of a key; counted by whoever turns them away."""
        self._flag = flag
        self._path = path
        self._file = FreshFiles([(flag, path)])
        self._file.changed()
        self._keys = self._read()
        self._digests = _digests(self._keys)

    def accepts(self, authorization: bytes | None) -> bool:
        """Whether the value of an Authorization header is `Bearer` with one of the keys."""
        self._refresh()
        match = _BEARER.fullmatch(authorization or b"")
        given = hashlib.sha256(match[1] if match else b"").digest()
        found = False
        for digest in self._digests:  # every one, so that the time tells nothing about which
            found |= hmac.compare_digest(given, digest)
        return found and match is not None

    def bearer(self) -> str:
        """The Authorization header of a client that calls with the first key. Raises AccessError without one."""
        self._refresh()
        if not self._keys:
            raise AccessError(f"{self._flag} {self._path} holds no key")
        return f"Bearer {self._keys[0].decode()}"

    def _refresh(self) -> None:
        if not self._file.changed():
            return
        try:
            self._keys = self._read()
            log.info("%s was read again; keys: %d", self._flag, len(self._keys))
        except AccessError as error:
            self._keys = []
            log.error("no key is accepted: %s", error)
        self._digests = _digests(self._keys)

    def _read(self) -> list[bytes]:
        (content,) = self._file.read()
        lines = [line.strip() for line in content.splitlines()]
        keys = [line for line in lines if line and not line.startswith(b"#")]
        for place, line in enumerate(lines, 1):
            if line and not line.startswith(b"#") and not _KEY.fullmatch(line):
                raise AccessError(f"{self._flag} {self._path}: line {place} is no key of visible ASCII characters")
        if not 1 <= len(keys) <= MAX_KEYS:
            raise AccessError(f"{self._flag} {self._path} holds {len(keys)} keys; it must hold 1 to {MAX_KEYS}")
        return keys


def _digests(keys: list[bytes]) -> list[bytes]:
    """Of equal length, which compare_digest needs to take equal time."""
    return [hashlib.sha256(key).digest() for key in keys]
