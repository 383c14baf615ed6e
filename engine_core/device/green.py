"""Green Contexts: two shares of one GPU's SMs, one for decode, one for the prefill lane (rules L1, L2).

Owns the split and everything created for it, through the driver table alone. A split that can't be had exactly is
refused with the nearest ones that can; a failure half-way releases what was created; streams are destroyed before their
contexts, and only once the caller has proven them idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from engine_core.device.base import LaneSizes
from engine_core.device.driver import STREAM_NON_BLOCKING, Driver, DriverError
from engine_core.device.lanes import LaneStream
from engine_core.errors import ConfigError

MIN_SMS = 8
SM_ALIGNMENT = 8
"""Both of compute capability 9.0."""
DEFAULT_DECODE_SMS = 48
"""Of 132: holds decode within 1.4 times its lone pace up to 16 rows, and costs prefill a third of its pace."""

AUTO_DECODE_SMS = (48, 56, 72, 88, 96)
"""What `auto` chooses from: each costs a second or two of the start."""


def check_split(decode_sms: int, total_sms: int) -> None:
    """Raise ConfigError, naming the nearest possible values, unless `decode_sms` SMs can be split off exactly."""
    largest = (total_sms - MIN_SMS) // SM_ALIGNMENT * SM_ALIGNMENT
    if largest < MIN_SMS:
        raise ConfigError(f"--decode-overlap green needs a GPU of at least {2 * MIN_SMS} SMs; this one has {total_sms}")
    if decode_sms % SM_ALIGNMENT == 0 and MIN_SMS <= decode_sms <= largest:
        return
    below = min(max(decode_sms // SM_ALIGNMENT * SM_ALIGNMENT, MIN_SMS), largest)
    above = min(below + SM_ALIGNMENT, largest)
    nearest = f"{below}" if above == below or decode_sms < MIN_SMS or decode_sms > largest else f"{below} or {above}"
    raise ConfigError(
        f"--decode-sms {decode_sms}: use {nearest} (multiples of {SM_ALIGNMENT} from {MIN_SMS} to {largest} of "
        f"{total_sms} SMs)"
    )


@dataclass(slots=True)
class GreenPartition:
    """A split in force. Decode graphs are captured on `decode` and replayed from the primary stream."""

    decode: LaneStream
    prefill: LaneStream
    decode_sms: int
    prefill_sms: int
    _owned: ExitStack

    def close(self) -> None:
        """Destroy streams, then contexts. The caller has proven both streams idle."""
        self._owned.close()


def lane_sizes(partitions: Sequence[GreenPartition]) -> LaneSizes:
    """Of a partitioned GPU."""
    most = partitions[-1]
    choices = tuple(partition.decode_sms for partition in partitions)
    return LaneSizes(most.decode_sms, most.prefill_sms, SM_ALIGNMENT, choices)


def split(driver: Driver, decode_sms: int) -> GreenPartition:
    """Split the GPU in `decode_sms` SMs and the rest. Raises ConfigError for a split that can't be had."""
    with ExitStack() as created:
        try:
            resource = driver.call("sm_resource")
            check_split(decode_sms, driver.call("sm_count", resource))
            group, rest = driver.call("sm_split", resource, decode_sms)
            got, left = driver.call("sm_count", group), driver.call("sm_count", rest)
            if got != decode_sms:
                raise ConfigError(f"--decode-sms {decode_sms}: the driver would give {got} SMs; use {got}")
            contexts = [_context(driver, part, created) for part in (group, rest)]
            streams = [_stream(driver, context, created) for context in contexts]
        except DriverError as error:
            raise ConfigError(
                f"--decode-overlap green can't be had on this GPU and driver ({error}); stream or off would work"
            ) from error
        decode, prefill = (LaneStream(stream, context) for stream, context in zip(streams, contexts, strict=True))
        return GreenPartition(decode, prefill, got, left, created.pop_all())


def _context(driver: Driver, resource: Any, created: ExitStack) -> Any:
    context = driver.call("green_ctx_create", driver.call("resource_descriptor", resource))
    created.callback(driver.call, "green_ctx_destroy", context)
    return context


def _stream(driver: Driver, context: Any, created: ExitStack) -> Any:
    """Streams are created after both contexts, so that the stack destroys them first."""
    stream = driver.call("green_ctx_stream_create", context, STREAM_NON_BLOCKING, 0)
    created.callback(driver.call, "stream_destroy", stream)
    return stream
