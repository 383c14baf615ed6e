"""Step logs, read: the lines that a worker wrote (`--step-log FILE`) as values.

Owns the format on this side. Times are µs since the header's `unix_time`. A line that can't be read (the last one of a
process that was killed) is counted and left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

VERSION = 1


class TraceError(Exception):
    """There is nothing to show, or nowhere to write it; the message says why, the status is the command's."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


class _Line(msgspec.Struct, tag_field="event", tag=str.lower):
    pass


class Header(_Line, kw_only=True):
    version: int
    greenlane: str
    unix_time: float
    model: str
    device: str
    rank: int
    overlap: str
    decode_sms: int
    prefill_sms: int
    clock: str
    """gpu: starts and ends are stamped by the GPU; host: by the worker, an end when it was seen."""


class Launch(_Line):
    """A plan enqueued by the host."""

    step: int
    at: int
    host_us: int
    decode_rows: int
    chunk_tokens: int
    lane: str


class PrefillLaunch(_Line, tag="prefill_launch"):
    """A batch given to the prefill lane. `decode_sms`: left to decode meanwhile; 0: none count, or an older log."""

    step: int
    at: int
    rows: int
    chunk_tokens: int
    decode_sms: int = 0


class Decode(_Line):
    """A step's work on the primary lane: decode rows, and chunks that share their forward."""

    step: int
    start: float
    end: float
    decode_rows: int
    chunk_tokens: int
    beside: bool
    """A prefill was in flight when it was launched."""


class Complete(_Line):
    """A batch done on the prefill lane."""

    step: int
    start: float
    end: float
    rows: int
    chunk_tokens: int


class Join(_Line):
    """`step` drew, on the primary lane, for the batch of step `prefill`."""

    step: int
    prefill: int
    start: float
    end: float


class Failed(_Line):
    step: int
    lane: str
    at: int


class Wait(_Line):
    """The host asleep until `step` is complete on `lane`, or whatever came first."""

    step: int
    lane: str
    at: int
    us: int


class Idle(_Line):
    """The host asleep with nothing in flight."""

    at: int
    us: int


class Dropped(_Line):
    """So many lines are missing."""

    lines: int


Event = Header | Launch | PrefillLaunch | Decode | Complete | Join | Failed | Wait | Idle | Dropped


@dataclass(slots=True)
class Run:
    """One worker's life. Lists are in order of time."""

    header: Header
    launches: list[Launch] = field(default_factory=list)
    prefill_launches: list[PrefillLaunch] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    prefills: list[Complete] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    idles: list[Idle] = field(default_factory=list)
    dropped: int = 0
    unreadable: int = 0

    def split(self) -> str:
        """SMs of the lanes, for people; with `auto` those that batches were given, empty where none count."""
        head, given = self.header, sorted({launch.decode_sms for launch in self.prefill_launches} - {0})
        if not head.decode_sms:
            return ""
        if head.overlap == "auto" and given:
            return f"{', '.join(map(str, given))} of {head.decode_sms + head.prefill_sms} SMs decode"
        return f"{head.decode_sms} SMs decode + {head.prefill_sms} prefill"

    def add(self, event: Event) -> None:
        match event:
            case Launch():
                self.launches.append(event)
            case PrefillLaunch():
                self.prefill_launches.append(event)
            case Decode():
                self.decodes.append(event)
            case Complete():
                self.prefills.append(event)
            case Join():
                self.joins.append(event)
            case Failed():
                self.failures.append(event)
            case Wait():
                self.waits.append(event)
            case Idle():
                self.idles.append(event)
            case Dropped():
                self.dropped += event.lines


def read_runs(path: Path) -> list[Run]:
    """The lives of the workers that appended to the file, oldest first. Raises TraceError when there is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}") from error
    runs: list[Run] = []
    for event in _events(data):
        if isinstance(event, Header):
            if event.version != VERSION:
                raise TraceError(f"{path} is a step log of version {event.version}; this greenlane reads {VERSION}")
            runs.append(Run(event))
        elif not runs:
            raise TraceError(f"{path} is no step log: it doesn't start with a header")
        elif event is None:
            runs[-1].unreadable += 1
        else:
            runs[-1].add(event)
    if not runs:
        raise TraceError(f"{path} is empty")
    return runs


def _events(data: bytes) -> Iterator[Event | None]:
    """Line by line; None for one that can't be read."""
    decoder = msgspec.json.Decoder(Event)
    for line in data.splitlines():
        if line:
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError:
                yield None
