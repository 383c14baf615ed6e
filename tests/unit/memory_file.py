"""Files in memory, for who writes to them: willing, in pieces, or full."""

from __future__ import annotations

import errno


class Memory:
    """A file that takes at most `piece` bytes a call."""

    def __init__(self, piece: int = 1 << 30) -> None:
        self.data = b""
        self.piece = piece
        self.closed = False

    def write(self, data: bytes, /) -> int:
        self.data += data[: self.piece]
        return min(len(data), self.piece)

    def close(self) -> None:
        self.closed = True


class Full(Memory):
    def write(self, data: bytes, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")
