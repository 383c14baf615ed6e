"""Shows on one GPU what can be shown nowhere else, and writes it down.

    scripts/gpu_check.sh [SECTION ...] [--out FOLDER] [--modes MODE ...] [--rows ROW ...]

Each section is a process of its own with a time limit, so that one that breaks its CUDA context breaks no other. What
they measured goes into FOLDER: `h200-smoke.json` holds every section but the loads, the newest run of each;
`h200-itl.jsonl` holds the mixed load and `h200-rows.jsonl` ordinary load, to which a run appends (`--fresh` begins
anew). All name card, driver, versions, commit and flags. A run starts from the committed results, so that sections can
be measured one at a time.

The exit status is 1 if something that must hold didn't. `--device fake` rehearses the harness on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is run as a script

try:
    from scripts.gpu import itl, masks, memcheck, overlap, rows, smoke, tests_on_gpu
    from scripts.gpu.options import ROOT, VARIANTS, Options, parse_mode, parse_row
    from scripts.gpu_kernels import machine
    from scripts.serving import process_tree
except ModuleNotFoundError as error:
    sys.exit(
        f"there is no {error.name} here: pip install -c constraints.txt -e '.[cuda,dev]', or without cuda for a dry run"
    )

RESULTS = ROOT / "scripts" / "bench" / "results"
SMOKE = "h200-smoke.json"
LOADS = {"itl": ("h200-itl.jsonl", itl.table), "rows": ("h200-rows.jsonl", rows.table)}
"""Sections of many lines: their files and tables."""
STOP_S = 60.0
"""For a section that is out of time to stop what it started."""

MAX_SHOWN = 24
"""Items of a list."""
LOG_LINES, MAX_LINE = 12, 400


@dataclass(frozen=True, slots=True)
class Section:
    """What runs, for how long at most, on which model unless --shape names another."""

    run: Callable[[Options], dict[str, Any] | Iterable[dict[str, Any]]]
    limit_s: float
    shape: str


SECTIONS = {
    "smoke": Section(smoke.run, 240, "0.6b"),
    "overlap": Section(overlap.run, 240, "4b"),
    "handoff": Section(partial(tests_on_gpu.run, file="test_hand_off.py"), 240, "tiny"),
    "staging": Section(partial(tests_on_gpu.run, file="test_staging.py"), 240, "tiny"),
    "failstop": Section(partial(tests_on_gpu.run, file="test_fail_stop.py"), 300, "0.6b"),
    "idle": Section(partial(tests_on_gpu.run, file="test_idle_wait.py"), 180, "0.6b"),
    "masks": Section(masks.run, 120, "0.6b"),
    "memcheck": Section(memcheck.run, 420, "tiny"),
    "itl": Section(itl.run, 1200, "4b"),
    "rows": Section(rows.run, 900, "4b"),
}


def main() -> int:
    options = parser().parse_args()
    if options.one:
        return run_one(options)
    check_options(options)
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    header = describe(options)
    failed = [name for name in options.sections or SECTIONS if not run_section(name, options, header)]
    print(f"failed: {', '.join(failed)}" if failed else "all held")
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    out.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    out.add_argument("--work", type=Path, default=Path("/tmp/greenlane-gpu-check"), help="logs and model shapes")
    out.add_argument("--device", default="cuda")
    out.add_argument(
        "--shape", choices=("tiny", "0.6b", "4b", "8b"), help="model of all sections; default: each its own"
    )
    out.add_argument("--commit", default="", help="what the results name, where the checkout has no history")
    out.add_argument("--limit", type=float, help="seconds for each section; default: each its own")
    out.add_argument(
        "--modes",
        nargs="*",
        type=parse_mode,
        default=[],
        help=f"itl, rows: lane modes (default: {' '.join(itl.MODES)}; rows: auto), perhaps with one behind of "
        + ", ".join(f"+{name}" for name in VARIANTS),
    )
    out.add_argument(
        "--rows",
        nargs="*",
        type=parse_row,
        default=[],
        help=f"itl, rows: loads (default: {' '.join((*itl.ROWS, *rows.ROWS))})",
    )
    out.add_argument("--injected-s", type=float, default=10.0, help="itl: how long prompts are injected")
    out.add_argument("--undisturbed-s", type=float, default=4.0, help="itl: how long a row without injection takes")
    out.add_argument("--repeats", type=int, default=1, help="rows: how often each is measured")
    out.add_argument("--fresh", action="store_true", help="itl, rows: begin the file anew")
    out.add_argument("--one", nargs=2, metavar=("SECTION", "FILE"), help=argparse.SUPPRESS)
    return out


def check_options(options: argparse.Namespace) -> None:
    """Refuse at once what would fail section by section."""
    for name in options.sections:
        if name not in SECTIONS:
            raise SystemExit(f"{name} is no section; there are {', '.join(SECTIONS)}")
    try:
        version("greenlane")
    except PackageNotFoundError:
        raise SystemExit("greenlane isn't installed here: pip install --no-deps --no-build-isolation -e .") from None


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Card, driver, versions, commit: what every result carries."""
    on_gpu = options.device.startswith("cuda")
    what = machine(options.commit) if on_gpu else {"card": f"none (--device {options.device})"}
    return {**what, "greenlane": version("greenlane"), "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")}


# ------------------------------ a section, seen from outside


def run_section(name: str, options: argparse.Namespace, header: dict[str, Any]) -> bool:
    """Run one section in its own process, write its results down, print them; whether all held."""
    section, result = SECTIONS[name], options.work / f"{name}.result.jsonl"
    result.unlink(missing_ok=True)
    print(f"=== {name}", flush=True)
    began = time.monotonic()
    ended = run_process([name, str(result)], options.limit or section.limit_s)
    seconds = round(time.monotonic() - began, 1)
    lines = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
    about = {**header, "seconds": seconds}
    if name in LOADS:
        return record_load(name, options, about, lines, ended)
    measured = lines[0] if lines else {}
    broken = [*measured.pop("broken", []), *([] if ended == "" else [ended])]
    record_smoke(options.out, name, {"about": about, "broken": broken, **measured})
    print("\n".join(short(measured)))
    if broken:
        print_logs(options.work, name)
    print("\n".join([*(f"BROKEN {what}" for what in broken), f"{name}: {seconds} s"]), flush=True)
    return not broken


def print_logs(folder: Path, name: str) -> None:
    """The ends of what the section's processes said."""
    for log in sorted(folder.glob(f"{name}*.log")):
        ends = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        print("\n".join([f"--- the end of {log}", *(line[:MAX_LINE] for line in ends)]))


def short(measured: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Figures as `a.b.c value` lines, for people; long lists and flags are in the file."""
    for key, value in measured.items():
        if isinstance(value, dict):
            yield from short(value, f"{prefix}{key}.")
        elif key != "flags" and not (isinstance(value, list) and len(value) > MAX_SHOWN):
            yield f"  {prefix}{key} {value}"


def run_process(arguments: list[str], limit_s: float) -> str:
    """How the section's process went wrong; empty when it ended well. Nothing it started is left."""
    process = subprocess.Popen([sys.executable, "-P", __file__, *sys.argv[1:], "--one", *arguments])
    try:
        status = process.wait(limit_s)
        return f"the section ended with status {status}" if status else ""
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        return f"the section took longer than {limit_s:g} s"
    finally:
        kill_tree(process.pid)
        process.wait()


def kill_tree(root: int) -> None:
    """SIGKILL for a process of ours and all below it."""
    for pid, _ in list(process_tree(root)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ------------------------------ a section, in its own process


def run_one(options: argparse.Namespace) -> int:
    """Write what the section measures to the file, a JSON line each, as it comes."""
    name, file = options.one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    section = SECTIONS[name]
    shape = options.shape or section.shape
    measured = section.run(
        Options(
            device=options.device,
            out=options.out,
            work=options.work,
            shape=shape,
            modes=tuple(options.modes),
            rows=tuple(options.rows),
            injected_s=options.injected_s,
            undisturbed_s=options.undisturbed_s,
            repeats=options.repeats,
        )
    )
    lines = [{"model": shape, **measured}] if isinstance(measured, dict) else measured
    with Path(file).open("w") as out:
        for line in lines:
            print(json.dumps(line), file=out, flush=True)
    return 0


# ------------------------------ the files


def record_smoke(folder: Path, name: str, measured: dict[str, Any]) -> None:
    """Replace one section's results; the smoke's modes stand at the top of the file."""
    results = json.loads(latest(folder, SMOKE) or "{}")
    about = measured.pop("about")
    results.setdefault("about", {})[name] = {**about, "broken": measured.pop("broken")}
    if name == "smoke":
        results.update(measured)
    else:
        results[name] = measured
    (folder / SMOKE).write_text(json.dumps(results, indent=1) + "\n")


def record_load(
    name: str, options: argparse.Namespace, about: dict[str, Any], lines: list[dict[str, Any]], ended: str
) -> bool:
    """Append the lines behind a header of this run, and print the table of all that the file holds."""
    file, table = LOADS[name]
    earlier = [] if options.fresh else latest(options.out, file).splitlines()
    header = {"about": about, "model": options.shape or SECTIONS[name].shape, "ended": ended or "well"}
    written = [*earlier, *(json.dumps(line) for line in (header, *lines))]
    (options.out / file).write_text("".join(f"{line}\n" for line in written))
    print("\n".join(table([json.loads(line) for line in written])), flush=True)
    print(f"{name}: {ended}" if ended else f"{name}: {about['seconds']} s", flush=True)
    held = not ended and not any("error" in line for line in lines)
    if not held:
        print_logs(options.work, name)
    return held


def latest(folder: Path, name: str) -> str:
    """The file as it is in the folder, or else as it was committed; empty without either."""
    found = [each / name for each in (folder, RESULTS) if (each / name).exists()]
    return found[0].read_text() if found else ""


if __name__ == "__main__":
    sys.exit(main())
