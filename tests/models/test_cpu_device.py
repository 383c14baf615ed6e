"""What opening the CPU device refuses."""

from __future__ import annotations

import pytest

from engine_core.device.cpu import open_device
from engine_core.device.fail_stop import Unbounded
from engine_core.errors import ConfigError
from tests.worker_config import worker_config


def test_more_kv_than_the_machine_gives_is_refused_by_the_flag() -> None:
    """Red when a size that no machine has ends in an OSError, and in restarts that meet it again."""
    config = worker_config(device="cpu", kv_cache_memory=1 << 60)
    with pytest.raises(ConfigError, match=r"pages of KV can't be had on this machine .* --kv-cache-memory"):
        open_device(config, Unbounded(), lambda what, done, total: None)
