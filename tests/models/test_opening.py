"""What opening a device without a GPU refuses."""

from __future__ import annotations

import pytest

from engine_core.device import cpu, fake
from engine_core.device.fail_stop import Unbounded
from engine_core.errors import ConfigError
from engine_core.worker.worker import OpenDevice
from tests.worker_config import worker_config


@pytest.mark.parametrize(("device", "open_device"), [("cpu", cpu.open_device), ("fake", fake.open_device)])
def test_more_kv_than_the_machine_gives_is_refused_by_the_flag(device: str, open_device: OpenDevice) -> None:
    """Red when a size that no machine has ends in an OSError or MemoryError, and in restarts that meet it again."""
    config = worker_config(device=device, kv_cache_memory=1 << 60)
    with pytest.raises(ConfigError, match=r"pages of KV can't be had on this machine .* --kv-cache-memory"):
        open_device(config, Unbounded(), lambda what, done, total: None)
