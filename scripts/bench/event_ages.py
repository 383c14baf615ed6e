"""How old events are when they are in the client's socket, and where they aged.

Owns the stamps of a server's processes (`inside/sitecustomize.py` makes them) and their arithmetic. Every event's
oldest token is followed by its request and position, from the engine core's commit until the frontend has given the
event's bytes to the kernel, so that no event hides behind younger ones of other streams. When the client gets round
to reading is its own affair, and told beside.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scripts.bench.http_streams import READ_FIELDS, Answer
from scripts.bench.inside.sitecustomize import HEAD

STAGES = ("waits in the engine core", "on its way to the frontend", "until in the client's socket")
Times = npt.NDArray[np.float64]
Item = TypeVar("Item", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Stamps:
    """By request number: when each of its tokens passed a place, and when its events were written."""

    numbers: dict[str, int]
    """By label."""
    committed: dict[int, Times]
    sent: dict[int, Times]
    received: dict[int, Times]
    written: dict[int, Times]
    """Of each event …"""
    counts: dict[int, npt.NDArray[np.int64]]
    """… and how many tokens there were then."""


def read_stamps(folder: Path) -> Stamps:
    """Of all processes; one session is expected."""
    numbers: dict[str, int] = {}
    items: dict[bytes, list[npt.NDArray[np.uint64]]] = {kind: [] for kind in (b"c", b"s", b"r", b"w")}
    times: dict[bytes, list[Times]] = {kind: [] for kind in items}
    for path in sorted(folder.glob("*.stamps")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            kind, now, size = HEAD.unpack_from(data, at)
            body = data[at + HEAD.size : at + HEAD.size + size]
            at += HEAD.size + size
            if kind == b"l":
                numbers[body[8:].decode()] = struct.unpack_from("<Q", body)[0]
                continue
            items[kind].append(np.frombuffer(body, "<u8"))
            times[kind].append(np.full(size // (16 if kind == b"w" else 8), now))
    joined = {kind: (np.concatenate(items[kind]), np.concatenate(times[kind])) for kind in items}
    committed, sent, received = (_split(*joined[kind]) for kind in (b"c", b"s", b"r"))
    pairs, at_times = joined[b"w"]
    counts = _split(pairs[::2], pairs[1::2].astype(np.int64))
    return Stamps(numbers, committed, sent, received, _split(pairs[::2], at_times), counts)


def _split(numbers: npt.NDArray[np.uint64], column: npt.NDArray[Item]) -> dict[int, npt.NDArray[Item]]:
    """Each number's items of the column, in their order."""
    order = np.argsort(numbers, kind="stable")
    found, starts = np.unique(numbers[order], return_index=True)
    return dict(zip(found.tolist(), np.split(column[order], starts[1:]), strict=True))


def aged(stamps: Stamps, answers: Sequence[Answer]) -> tuple[Times, Times]:
    """Seconds: [events, 3] of each event's oldest token in STAGES; [events] until the client had read the event."""
    stages: list[Times] = []
    late: list[Times] = []
    for answer in answers:
        number = stamps.numbers[answer.label]
        counts, events = np.unique(stamps.counts[number], return_index=True)  # the end may come without a token
        written = stamps.written[number][events]
        oldest = np.concatenate(([0], counts[:-1]))
        tokens, read = np.array(answer.reads).reshape(-1, READ_FIELDS).T
        read = read[np.searchsorted(tokens, counts)]
        # The stamp is the end of all writes of its turn: what the client has read before was there before.
        arrived = np.minimum(written, read)
        points = [one[number][oldest] for one in (stamps.committed, stamps.sent, stamps.received)]
        stages.append(np.diff(np.stack([*points, arrived]), axis=0).T)
        late.append(read - arrived)
    return np.concatenate(stages), np.concatenate(late)
