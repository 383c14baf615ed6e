"""`greenlane trace`: a step log in, a summary and three files out.

Owns the names of the files and what is said. The picture of a README is made from a log of `greenlane serve --step-log
FILE` by `greenlane trace FILE --out docs/lanes`: it writes docs/lanes.svg, docs/lanes.png and docs/lanes.trace.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import rich.console

from frontend.trace.chrome import chrome_trace
from frontend.trace.picture import draw
from frontend.trace.png import render_png
from frontend.trace.read import Run, TraceError, read_runs
from frontend.trace.summary import as_json, print_summary, summarize
from frontend.trace.svg import render_svg


def trace(log: Path, out: str | None) -> int:
    """Summarize and draw the last life of a worker in the log; the exit status: 1 without steps, 2 unreadable."""
    name = str(log.with_suffix("")) if out is None else out
    try:
        runs = read_runs(log)
        run = runs[-1]
        if not run.decodes:
            raise TraceError(
                f"{log} holds no step of the last worker that wrote to it: send it a request, and trace again", 1
            )
        files = _write(name, run)
    except TraceError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.status
    summary = summarize(run)
    console = rich.console.Console()
    if len(runs) > 1:
        console.print(f"the last of {len(runs)} workers that wrote to {log}", highlight=False)
    print_summary(console, run, summary)
    sys.stdout.write(f"written: {' '.join(files)}\n")
    sys.stdout.write(json.dumps({**as_json(run, summary), "files": files}) + "\n")
    return 0


def _write(name: str, run: Run) -> list[str]:
    """Raises TraceError when a file can't be written."""
    scene = draw(run)
    files = {
        f"{name}.trace.json": (json.dumps(chrome_trace(run), ensure_ascii=False) + "\n").encode(),
        f"{name}.svg": render_svg(scene).encode(),
        f"{name}.png": render_png(scene),
    }
    for path, data in files.items():
        try:
            Path(path).write_bytes(data)
        except OSError as error:
            raise TraceError(f"{path} can't be written: {error.strerror}") from error
    return list(files)
