"""Green Context splits on the fake driver: rule L1."""

from __future__ import annotations

import pytest

from engine_core.device.driver import Driver, Status
from engine_core.device.fail_stop import Unbounded
from engine_core.device.fake_driver import FakeTable
from engine_core.device.green import check_split, split
from engine_core.errors import ConfigError


class Script:
    """Fails the nth call of a name."""

    def __init__(self, call: str = "", nth: int = 1) -> None:
        self.call, self.nth = call, nth

    def fault(self, call: str) -> tuple[int, bool] | None:
        if call != self.call:
            return None
        self.nth -= 1
        return (Status.OUT_OF_MEMORY, False) if self.nth == 0 else None

    def progress(self, table: FakeTable) -> None:
        table.run_all()


@pytest.mark.parametrize(
    ("wanted", "says"),
    [(66, "use 64 or 72"), (4, "use 8 "), (0, "use 8 "), (-3, "use 8 "), (128, "use 120"), (10**9, "use 120")],
)
def test_l1_impossible_splits_name_the_nearest(wanted: int, says: str) -> None:
    """L1: red when a split is rounded in silence or the message names nothing that works."""
    with pytest.raises(ConfigError, match=says):
        check_split(wanted, 132)


def test_l1_small_gpus_are_refused() -> None:
    """L1: red when a GPU that holds no two partitions is split."""
    with pytest.raises(ConfigError, match="at least 16 SMs"):
        check_split(8, 12)


def test_l1_split_takes_exactly_what_was_asked_for() -> None:
    """L1: red when the partitions don't add up or streams don't belong to their contexts."""
    table = FakeTable(sms=132)
    partition = split(Driver(table, Unbounded()), 64)
    assert (partition.decode_sms, partition.prefill_sms) == (64, 68)
    assert table.streams[0].green_ctx is partition.decode.green_ctx
    assert table.streams[1].green_ctx is partition.prefill.green_ctx
    partition.close()
    tail = table.calls[-4:]
    assert tail == ["stream_destroy", "stream_destroy", "green_ctx_destroy", "green_ctx_destroy"]


@pytest.mark.parametrize(
    ("call", "nth", "created"),
    [
        ("sm_resource", 1, 0),
        ("sm_split", 1, 0),
        ("resource_descriptor", 2, 1),
        ("green_ctx_create", 1, 0),
        ("green_ctx_create", 2, 1),
        ("green_ctx_stream_create", 1, 2),
        ("green_ctx_stream_create", 2, 2),
    ],
)
def test_l1_failure_half_way_releases_what_was_created(call: str, nth: int, created: int) -> None:
    """L1: red when an error path leaks a context or stream, or destroys a context before its stream."""
    table = FakeTable(Script(call, nth))
    with pytest.raises(ConfigError, match="stream or off would work"):
        split(Driver(table, Unbounded()), 64)
    assert all(not stream.alive for stream in table.streams)
    assert table.calls.count("green_ctx_destroy") == created
