"""An engine-core process with the fake device, as tests start it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
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
        """The ready line; fails when the process ends without one."""
        line = await guarded(asyncio.to_thread(self._read_ready))
        assert line, self.stderr()
        message: dict[str, Any] = json.loads(line)
        (self.worker,) = self.process.children()
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

    def close(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.process.children(recursive=True), self.process]:
                process.kill()
        self.process.wait(GUARD_S)
        os.close(self.read_fd)
        self.errors.close()


async def guarded(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, GUARD_S)
