"""Folders of a process's own, closed to other users, where its local sockets lie.

Owns their beginning and end, the end of those included whose process was killed and couldn't remove them: a folder's
owner holds a lock on a file in it for as long as it lives, so whoever gets that lock removes what nobody needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from access.policy import AccessError

PREFIX = "greenlane-"
LOCK = "owner.lock"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder of mode 0700 in the user's runtime folder (else the temporary one), removed at the end.

    Those that killed processes left beside it are removed first, and at the end, since this process may have killed
    some. Raises AccessError where none can be made.
    """
    parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    remove_abandoned(parent)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise AccessError(
            f"no folder for sockets can be made in {parent}: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours"
        ) from error
    try:
        with _held(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        remove_abandoned(parent)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The lock gets its name once it is held: there is no moment in which the folder looks abandoned."""
    unnamed = folder / f"{LOCK}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(folder / LOCK)
        yield
    finally:
        os.close(lock)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove this user's folders whose owners are gone; which ones. What can't be told or removed is left alone."""
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if _is_ours(folder) and _remove_if_abandoned(folder):
                    removed.append(folder)
    return removed


def _is_ours(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _remove_if_abandoned(folder: Path) -> bool:
    """Raises OSError for a folder without a lock, or one whose lock is held."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
    return True
