"""The streams that the lanes of an overlap mode run on (rules L3, L4).

Owns which streams there are and how they are created, through the driver table alone; `green.py` owns the split.
"""

from __future__ import annotations

from contextlib import ExitStack

from engine_core.device.driver import STREAM_NON_BLOCKING, Driver
from engine_core.device.green import AUTO_DECODE_SMS, DEFAULT_DECODE_SMS, GreenPartition, split
from engine_core.device.lanes import LaneStream
from engine_core.step import Lane


def open_streams(
    driver: Driver, overlap: str, decode_sms: int | None, created: ExitStack
) -> tuple[dict[Lane, LaneStream], list[GreenPartition]]:
    """Streams by lane, and the partitions of `green` (one) and `auto`; `created` destroys all of it, once proven idle.

    The primary stream is one of its own, never the legacy default stream, and of the highest priority; a prefill
    stream that shares the SMs is of the lowest. Raises ConfigError for a split that can't be had.
    """
    least, greatest = driver.call("stream_priority_range")
    streams = {Lane.PRIMARY: _stream(driver, greatest, created)}
    if overlap == "stream":
        streams[Lane.PREFILL] = _stream(driver, least, created)
    if overlap not in ("green", "auto"):
        return streams, []
    default = AUTO_DECODE_SMS if overlap == "auto" else (DEFAULT_DECODE_SMS,)
    partitions = []
    for sms in default if decode_sms is None else (decode_sms,):
        partitions.append(split(driver, sms))
        created.callback(partitions[-1].close)
    streams[Lane.PREFILL] = partitions[-1].prefill
    return streams, partitions


def _stream(driver: Driver, priority: int, created: ExitStack) -> LaneStream:
    stream = driver.call("stream_create", STREAM_NON_BLOCKING, priority)
    created.callback(driver.call, "stream_destroy", stream)
    return LaneStream(stream)
