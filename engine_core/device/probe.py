"""What torch says about this machine, as one JSON object on stdout: `python -P -m engine_core.device.probe`.

Owns the questions of `greenlane check` that need torch; a process of its own, because importing torch may be slow,
fail or crash. Decides nothing about fitness.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def describe_devices() -> dict[str, Any]:
    """torch's version, build and threads, and each GPU's name, capability, SMs and memory in bytes."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(
                {
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "sms": properties.multi_processor_count,
                    "memory_bytes": properties.total_memory,
                }
            )
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(), "gpus": gpus}


if __name__ == "__main__":
    json.dump(describe_devices(), sys.stdout)
