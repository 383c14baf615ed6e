"""A small worker's configuration, for tests that change what they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_core.config import WorkerConfig

MODEL = Path(__file__).parent / "fixtures" / "tiny-qwen3-austen"


def worker_config(**changes: Any) -> WorkerConfig:
    """Four sequences of the tiny model on the fake device, without lanes."""
    small: dict[str, Any] = {
        "model": str(MODEL),
        "device": "fake",
        "dtype": "auto",
        "load_format": "dummy",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "page_size": 4,
        "kv_cache_memory": 1 << 20,
        "gpu_memory_utilization": 0.9,
        "async_depth": 2,
        "decode_overlap": "off",
        "decode_sms": None,
        "threads": 1,
        "gpu_wait_timeout": 60.0,
        "crash_dir": None,
    }
    return WorkerConfig(**small | changes)
