"""A real worker process whose simulated driver fails one call; started by tests, never by the product.

`python -P faulty_worker.py FAULT PACE LOG --connect ipc:///path --rank 0 …`. FAULT is `call:nth:hang`, `call:nth:fail`
or `none`; calls count once serving has begun. PACE is `eager`, or `pending`: only a stream's synchronization runs work.
LOG gets a line for each driver call of the worker's own thread, and one for the release of memory.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_core.config import WorkerConfig
from engine_core.device import fake
from engine_core.device.base import Device
from engine_core.device.driver import Status, Watch
from engine_core.device.fake_driver import FakeTable
from engine_core.worker import worker


class FaultyScript:
    """The fault named on the command line, and a log of all calls, written through at once."""

    def __init__(self, fault: str, pace: str, log: Path) -> None:
        self._call, _, rest = fault.partition(":")
        nth, _, self._how = rest.partition(":")
        self._nth = int(nth or 0)
        self._pending = pace == "pending"
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.serving = False

    def note(self, line: str) -> None:
        os.write(self._log, f"{line}\n".encode())

    def fault(self, call: str) -> tuple[int, bool] | None:
        if not self.serving:
            return None
        self.note(call)
        if call != self._call:
            return None
        self._nth -= 1
        if self._nth != 0:
            return None
        if self._how == "hang":
            threading.Event().wait()
        return Status.LAUNCH_FAILED, False

    def progress(self, table: FakeTable) -> None:
        if not self._pending:
            table.run_all()


class FaultyTable(FakeTable):
    """Waiting for an event takes for ever, in a thread of its own: nothing but a stream's synchronization is proof."""

    def event_synchronize(self, event: Any) -> tuple[int]:
        threading.Event().wait()
        raise AssertionError("nobody sets it")


def opener(script: FaultyScript) -> Callable[..., Device]:
    def open_device(config: WorkerConfig, watch: Watch, progress: Callable[[str, int, int], None]) -> Device:
        device = fake.open_on(FaultyTable(script), config, watch, progress)
        close = device.compute.close

        def noted_close() -> None:
            script.note("free")
            close()

        setattr(device.compute, "close", noted_close)  # noqa: B010
        script.serving = True
        return device

    return open_device


def main(fault: str, pace: str, log: str, *arguments: str) -> int:
    script = FaultyScript(fault, pace, Path(log))
    worker.device_opener = lambda device: opener(script)
    return worker.main(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
