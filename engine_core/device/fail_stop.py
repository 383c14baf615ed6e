"""The one way a worker dies on purpose, and the watchdog that makes blocking calls bounded.

`FailStop.abort` is rule O15: it tells the core why (farewell frame, then the control pipe, which was opened before any
GPU call), logs the whole cause chain, writes the crash report and ends the process at once, without destructors, atexit
handlers or a core dump. Nothing may free memory after the decision to abort: a kernel may still be writing to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from engine_core.errors import describe_chain

EXIT_ABORT = 134
MAX_CAUSE_BYTES = 8192

log = logging.getLogger("greenlane.worker")


class FailStop:
    """Ends the process with its cause told. Every part is passed in, so that tests can watch it."""

    def __init__(
        self,
        *,
        farewell: Callable[[str], None],
        control_fd: int | None,
        crash_dir: str | None,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._farewell = farewell
        self._control_fd = control_fd
        self._crash_dir = crash_dir
        self._end = end
        self._once = threading.Lock()

    def abort(self, what: str, error: BaseException | None = None) -> None:
        """Tell, log, report, end. Does not return (unless `end` does). A second caller waits for the first."""
        with self._once:
            cause = what if error is None else f"{what}: {describe_chain(error)}"
            self._tell(cause)
            with contextlib.suppress(Exception):
                log.critical("worker aborts", extra={"fields": {"cause": cause}})
            if self._crash_dir is not None:
                with contextlib.suppress(OSError):
                    write_crash_report(Path(self._crash_dir), "worker", cause)
            self._end(EXIT_ABORT)

    def _tell(self, cause: str) -> None:
        """Farewell by the control pipe first (a synchronous write), then by frame; neither may stop the abort."""
        if self._control_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._control_fd, cause.encode("utf-8", "replace")[:MAX_CAUSE_BYTES])
        with contextlib.suppress(Exception):
            self._farewell(cause)


class Watchdog:
    """Calls `expired` when a bounded section outlives its bound (rule E6).

    The thread looks at the deadline when it falls due, or once a bound while there is none: a section entered meanwhile
    falls due no earlier than that, so entering and leaving wake nobody.
    """

    def __init__(self, bound_s: float, expired: Callable[[str], None]) -> None:
        self._bound_s = bound_s
        self._expired = expired
        self._section: tuple[str, float] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """A section that must end within the bound. Sections nest; the outermost deadline holds. One thread only."""
        if self._section is not None:
            yield
            return
        self._section = (what, time.monotonic() + self._bound_s)
        try:
            yield
        finally:
            self._section = None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        left = self._bound_s
        while not self._closed.wait(left):
            section = self._section
            left = self._bound_s if section is None else section[1] - time.monotonic()
            if section is not None and left <= 0:
                self._expired(f"{section[0]} did not end within {self._bound_s:g} s (--gpu-wait-timeout)")
                return


class Unbounded:
    """A watch for simulations and devices whose work is complete before any wait."""

    def bounded(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def write_crash_report(folder: Path, who: str, cause: str) -> Path:
    """A JSON file with the cause chain and versions, ids and lengths only; returns its path."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"greenlane-{who}-{os.getpid()}-{time.time_ns()}.json"
    report = {
        "who": who,
        "pid": os.getpid(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cause": cause,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": getattr(sys.modules.get("torch"), "__version__", None),
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path
