"""Paths of local sockets: is their folder private, leftovers of dead processes, what may not be overwritten.

Owns the checks that come before a bind (libzmq and gRPC unlink whatever lies at the path, a regular file or a live
server's socket included). Binds nothing itself.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from engine_core.errors import ConfigError

MAX_PATH_BYTES = 107
"""sun_path holds 108 bytes, one of them the closing zero."""


def check_private(folder: Path) -> None:
    """Raise ConfigError unless the folder is this user's and closed to everyone else."""
    try:
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"the socket folder {folder} can't be used: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"the socket folder {folder} must be yours and of mode 0700: make one with mkdir -m 700")


def claim_private(path: Path) -> None:
    """`claim` a path in a folder that must be this user's own and closed to others. Raises ConfigError."""
    check_private(path.absolute().parent)
    claim(path)


def claim(path: Path) -> None:
    """Make `path` free for a bind: a dead process's socket is unlinked, anything else there is refused.

    Raises ConfigError for a path that is too long, a file that is no socket, or a socket that somebody listens on.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"the folder of the socket path {path} doesn't exist") from None
        return
    except OSError as error:
        raise ConfigError(f"the socket path {path} can't be used: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is no socket; remove it or choose another path")
    if _answers(path):
        raise ConfigError(f"another process listens on {path}; stop it or choose another path")
    path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    """Whether somebody accepts connections there; an overfull listener counts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError as error:
            raise ConfigError(f"the socket path {path} can't be used: {error.strerror}") from error
        return True
