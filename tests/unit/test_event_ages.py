"""The arithmetic of events' ages, from stamps as a server's processes leave them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.event_ages import aged, read_stamps
from scripts.bench.http_streams import Answer
from scripts.bench.stamped.sitecustomize import FOLDER, StampFile


def packed(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


async def test_an_event_is_as_old_as_its_oldest_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if an event is dated by its newest token, by another stream's, or by when the client got round to reading."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    stamps = StampFile()
    stamps.add(b"l", packed(7) + b"cmpl-seven", 0.0)
    stamps.add(b"l", packed(8) + b"cmpl-eight", 0.0)
    for at, rows in ((1.0, (7, 8)), (2.0, (7, 8)), (3.0, (7,))):
        stamps.add(b"c", packed(*rows), at)
    stamps.add(b"s", packed(7, 8), 1.25)
    stamps.add(b"r", packed(7, 8), 1.5)
    stamps.add(b"w", packed(7, 1, 8, 1), 1.75)
    stamps.add(b"s", packed(7, 8, 7), 3.5)
    stamps.add(b"r", packed(7, 8, 7), 4.0)
    stamps.add(b"w", packed(7, 3, 8, 2), 5.0)
    stamps.add(b"w", packed(8, 2), 6.0)  # its end, without a token
    seven, eight = Answer(b""), Answer(b"")
    seven.label, eight.label = "cmpl-seven", "cmpl-eight"
    seven.reads.extend((1, 2.75, 3, 5.5))
    eight.reads.extend((1, 1.7, 2, 9.0))
    stages, late = aged(read_stamps(tmp_path), [seven, eight])
    np.testing.assert_allclose(
        stages, [[0.25, 0.25, 0.25], [1.5, 0.5, 1.0], [0.25, 0.25, 0.2], [1.5, 0.5, 1.0]], atol=1e-9
    )
    np.testing.assert_allclose(late, [1.0, 0.5, 0.0, 4.0], atol=1e-9)
