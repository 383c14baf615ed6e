"""An engine-core process with the fake device, as tests start it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

MODEL = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-austen"
GUARD_S = 60.0


class Core:
    """A started engine-core process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.read_fd, write_fd = os.pipe()
        self.errors = (folder / "stderr").open("w+")
        self.process = psutil.Popen(
            [
                *(sys.executable, "-P", "-m", "engine_core", "engine", f"--model={MODEL}", "--device=fake"),
                *("--load-format=dummy", f"--ready-fd={write_fd}", f"--address=unix:{folder / 'grpc.sock'}", *flags),
            ],
            pass_fds=(write_fd,),
            stdin=subprocess.DEVNULL,
            stderr=self.errors,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        )
        os.close(write_fd)

    async def ready(self) -> dict[str, Any]:
        """The ready line of a core with a worker of its own."""
        message = await self.announced()
        (self.worker,) = self.process.children()
        return message

    async def announced(self) -> dict[str, Any]:
        """The ready line; fails when the process ends without one."""
        line = await guarded(asyncio.to_thread(self._read_ready))
        assert line, self.stderr()
        message: dict[str, Any] = json.loads(line)
        return message

    def _read_ready(self) -> bytes:
        with os.fdopen(os.dup(self.read_fd), "rb") as pipe:
            return pipe.read()

    async def ends_with(self) -> int:
        """The exit status."""
        return int(await guarded(asyncio.to_thread(self.process.wait, GUARD_S)))

    def files(self) -> list[str]:
        """What lies in its folder."""
        return sorted(path.name for path in self.folder.iterdir())

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def logged(self, name: str) -> dict[str, Any]:
        """The fields of the event of this name, once it is in the log."""
        return logged(self.folder / "stderr", name, self.process)

    def close(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.process.children(recursive=True), self.process]:
                process.kill()
        self.process.wait(GUARD_S)
        os.close(self.read_fd)
        self.errors.close()


async def guarded(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, GUARD_S)


def logged(log: Path, name: str, process: psutil.Popen) -> dict[str, Any]:
    """The fields of the event of this name, once the process has written it."""
    guard = time.monotonic() + GUARD_S
    while True:
        running = process.poll() is None
        lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        for line in lines:
            if line["event"] == name:
                return dict(line)
        assert running, f"it ended without {name}"
        assert time.monotonic() < guard, log.read_text()
        time.sleep(0.02)
