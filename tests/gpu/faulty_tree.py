"""`greenlane serve` whose first worker goes wrong: the product's own processes around a device of faults.py.

    python -P -m tests.gpu.faulty_tree FAULT serve|engine|worker FLAGS

FAULT is a JSON file, {"kind": …, "tokens": N, "milliseconds": M}. The first worker to start takes it away, so that the
worker of a restarted engine core is a plain one. The fault strikes at the first prefill on its own lane of N tokens or
more, which must come while another row decodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from engine_core.device.base import Batch, Device
from engine_core.device.driver import Driver, Status
from engine_core.device.fail_stop import FailStop
from engine_core.log import event
from engine_core.step import Lane
from tests.gpu.faults import FaultyCompute, FaultyTable

log = logging.getLogger("greenlane.worker")

Arguments = Sequence[str]


def main(arguments: Arguments) -> int:
    fault, role, *flags = arguments
    return {"serve": serve, "engine": engine, "worker": worker}[role](Path(fault), flags)


def module_command(fault: Path, role: str, *flags: str) -> list[str]:
    return [sys.executable, "-P", "-m", "tests.gpu.faulty_tree", str(fault), role, *flags]


def serve(fault: Path, flags: Arguments) -> int:
    """`greenlane serve`, whose engine core is `engine` below."""
    from frontend import cli
    from frontend import serve as serving

    real = serving.make_plan

    def make_plan(*args: Any) -> serving.Plan:
        plan = real(*args)
        at = plan.engine.index("engine")
        return dataclasses.replace(plan, engine=module_command(fault, "engine", *plan.engine[at + 1 :]))

    with mock.patch.object(serving, "make_plan", make_plan):
        cli.app(["serve", *flags], standalone_mode=True)
    return 0


def engine(fault: Path, flags: Arguments) -> int:
    """The engine core, whose worker is `worker` below."""
    from engine_core import cli
    from engine_core.executor import processes

    def worker_command(rank: int, log_level: str) -> Callable[[str, int], Arguments]:
        build = processes.worker_command(rank, log_level)

        def command(address: str, control_fd: int) -> Arguments:
            argv = list(build(address, control_fd))
            return module_command(fault, "worker", *argv[argv.index("worker") + 1 :])

        return command

    with mock.patch("engine_core.main.worker_command", worker_command):
        return cli.main(["engine", *flags])


def worker(fault: Path, flags: Arguments) -> int:
    """The worker, over a device that strikes once; a plain one if the fault is taken already."""
    from engine_core import cli
    from engine_core.worker import worker as process

    patches = contextlib.ExitStack()
    if fault.exists():
        script = json.loads(fault.read_text())
        fault.unlink()
        real = process.device_opener
        patches.enter_context(mock.patch.object(process, "device_opener", lambda name: opener(real(name), script)))
        patches.enter_context(mock.patch.object(process, "FailStop", StampedFailStop))
    with patches:
        return cli.main(["worker", *flags])


class StampedFailStop(FailStop):
    """Logs the moment of the decision, before anybody is told."""

    def abort(self, what: str, error: BaseException | None = None) -> None:
        event(log, logging.INFO, "abort_decided", pid=os.getpid())
        super().abort(what, error)


# ------------------------------ the device


def opener(real: Callable[..., Device], script: dict[str, Any]) -> Callable[..., Device]:
    def open_device(config: Any, watch: Any, progress: Any) -> Device:
        device = real(config, watch, progress)
        table = FaultyTable(device.driver.table)
        compute = FaultyCompute(device.compute)
        strike = STRIKES[script["kind"]](device, table, compute, script)
        compute.before[Lane.PREFILL] = functools.partial(once, script["tokens"], compute, strike)
        return dataclasses.replace(device, compute=compute, driver=Driver(table, watch))

    return open_device


def once(tokens: int, compute: FaultyCompute, strike: Callable[[], None], batch: Batch) -> None:
    if int(batch.lengths.sum()) >= tokens:
        del compute.before[Lane.PREFILL]
        event(log, logging.INFO, "fault_strikes", step=batch.step)
        strike()


Strike = Callable[[Device, FaultyTable, FaultyCompute, dict[str, Any]], Callable[[], None]]


def hold(device: Device, table: FaultyTable, compute: FaultyCompute, script: dict[str, Any]) -> Callable[[], None]:
    """The prefill starts behind a kernel that takes its time and ends by itself."""
    import torch

    from tests.gpu.probes import Probes

    cuda: Any = torch.cuda
    probes = Probes(Path(tempfile.mkdtemp()))
    stream = cuda.ExternalStream(int(device.streams[Lane.PREFILL].stream))

    def strike() -> None:
        with cuda.stream(stream):
            probes.hold(script["milliseconds"])

    return strike


def assertion(device: Device, table: FaultyTable, compute: FaultyCompute, script: dict[str, Any]) -> Callable[[], None]:
    """A device-side assert on the prefill lane."""
    import torch

    cuda: Any = torch.cuda
    never = torch.zeros(1, dtype=torch.bool, device="cuda")
    stream = cuda.ExternalStream(int(device.streams[Lane.PREFILL].stream))
    cuda.synchronize()

    def strike() -> None:
        with cuda.stream(stream):
            torch._assert_async(never)

    return strike


def unprovable(
    device: Device, table: FaultyTable, compute: FaultyCompute, script: dict[str, Any]
) -> Callable[[], None]:
    """The decode step beside the prefill fails, and the lanes can't be synchronized then."""

    def fail(batch: Batch) -> None:
        table.failing["stream_synchronize"] = [Status.LAUNCH_FAILED]
        raise MemoryError("injected")

    def strike() -> None:
        compute.after["forward", Lane.PRIMARY] = fail

    return strike


STRIKES: dict[str, Strike] = {"hold": hold, "assert": assertion, "unprovable": unprovable}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
