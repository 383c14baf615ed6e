"""What the benches of the front count: events however they are cut, their ages from stamps, cores that are apart."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from scripts.bench import cores
from scripts.bench.event_ages import aged, read_stamps
from scripts.bench.http_streams import Answer
from scripts.bench.inside.sitecustomize import FOLDER, StampFile


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
    stamps.flush()
    seven, eight = Answer(b""), Answer(b"")
    seven.label, eight.label = "cmpl-seven", "cmpl-eight"
    seven.reads.extend((1, 2.75, 3, 5.5))
    eight.reads.extend((1, 1.7, 2, 9.0))
    stages, late = aged(read_stamps(tmp_path), [seven, eight])
    np.testing.assert_allclose(
        stages, [[0.25, 0.25, 0.25], [1.5, 0.5, 1.0], [0.25, 0.25, 0.2], [1.5, 0.5, 1.0]], atol=1e-9
    )
    np.testing.assert_allclose(late, [1.0, 0.5, 0.0, 4.0], atol=1e-9)


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
async def test_events_are_counted_however_they_are_cut(size: int) -> None:
    """Red if an event that begins in one read and ends in the next is missed, or counted twice."""
    usage = b'"usage":{"completion_tokens":%d,"total_tokens":9}'
    event = b'3a\r\ndata: {"id":"cmpl-7","choices":[{"text":"x"}],' + usage + b"}\n\n\r\n"
    sent = b"".join([event % tokens for tokens in (1, 2, 5)] + [event % 5, b"data: [DONE]\n\n"])
    answer = Answer(b"")
    for at in range(0, len(sent), size):
        answer.data_received(sent[at : at + size])
    answer.connection_lost(None)
    answer.check(5)
    assert (answer.label, answer.events, answer.begun.done()) == ("cmpl-7", 3, True)
    assert list(answer.reads[::2]) == ([5.0] if size == 4096 else [1.0, 2.0, 5.0])


def test_siblings_of_cores_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if two frontends that are to have a core each get two hardware threads of one."""
    for cpu, siblings in enumerate(("0-1", "0-1", "2-3", "2-3")):
        (tmp_path / str(cpu)).write_text(siblings)
    monkeypatch.setattr(cores, "SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 8})
    assert cores.available() == [0, 2, 8, 1, 3]
