"""`greenlane bench`: the mixed load on a server, with a progress bar, a table, JSON and a picture.

Owns what is asked of the server beforehand, the sizes that follow from its answer, and what is said.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import rich.box
import rich.console
import rich.progress
import rich.table
import uvloop

from frontend.bench.client import BenchError, Target
from frontend.bench.mix import DECODER_PROMPT, FIRST_EVENTS, Mix, Phase, Run, figures
from frontend.bench.picture import draw
from frontend.trace.svg import render_svg

PHASES = ("undisturbed", "injected")
LONGEST_OUTPUT = 8000
DOES = {"starting": "starting decoders", "undisturbed": "decoders alone", "injected": "prompts arrive"}
COLUMNS = {
    "ITL p50": "itl_p50_ms",
    "p90": "itl_p90_ms",
    "p99": "itl_p99_ms",
    "max": "itl_max_ms",
    "tok/s": "decode_tok_s",
    "TTFT p50": "ttft_p50_ms",
    "p99 ": "ttft_p99_ms",
}
ELSEWHERE = "For ordinary load (arrivals, sweeps, data sets) use aiperf, guidellm or vllm bench serve."


@dataclass(frozen=True, slots=True)
class Files:
    """Where results go, if anywhere."""

    json: Path | None
    plot: Path | None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def bench(url: str, mix: Mix, files: Files, ca_certs: str | None, api_key_file: str | None) -> int:
    """Measure and tell; the exit status: 1 where the server fails, 2 where the load can't be had.

    `mix.model` "" is the server's first; `mix.output` 0 is as much as its context holds.
    """
    try:
        _check(mix)
        target = Target.of(url, ca_certs, api_key_file)
        mix, phases = uvloop.run(_measure(target, mix))
        console = rich.console.Console()
        _print(console, mix, phases)
        _write(files, url, mix, phases)
    except BenchError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.status
    console.print(ELSEWHERE, style="dim", highlight=False, soft_wrap=True)
    return 0


def _check(mix: Mix) -> None:
    """Raise BenchError (2) for a load that isn't one."""
    least = {"decoders": 1, "inject_len": 1, "n": 1, "vocabulary": 11}
    for name, low in least.items():
        if getattr(mix, name) < low:
            raise BenchError(f"--{name.replace('_', '-').replace('vocabulary', 'vocab')} must be {low} at least", 2)
    if not (mix.qps > 0 and mix.seconds > 0):
        raise BenchError("--qps and --seconds must be above 0", 2)


async def _measure(target: Target, mix: Mix) -> tuple[Mix, list[Phase]]:
    mix = _fitted(mix, await _models(target))
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description:<17}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        console=rich.console.Console(stderr=True),
    ) as progress:
        bars = {name: progress.add_task(DOES[name], total=1.0, start=False) for name in ("starting", *PHASES)}

        def tell(name: str, done: float) -> None:
            progress.start_task(bars[name])
            progress.update(bars[name], completed=done)
            if done >= 1:
                progress.stop_task(bars[name])

        return mix, await Run(target, mix, tell).measure(PHASES)


async def _models(target: Target) -> list[_Model]:
    """What the server has. Raises BenchError."""
    lines: list[bytes] = []
    await target.fetch("GET", "/v1/models", b"", lambda _, line: lines.append(line))
    try:
        models = msgspec.json.decode(b"\n".join(lines), type=_Models).data
    except msgspec.DecodeError as error:
        raise BenchError(f"GET /v1/models: {error}") from error
    if not models:
        raise BenchError("the server has no model")
    return models


def _fitted(mix: Mix, models: Sequence[_Model]) -> Mix:
    """With a model and an output that the server has room for. Raises BenchError (2) where there is none."""
    model = models[0] if not mix.model else next((each for each in models if each.id == mix.model), None)
    if model is None:
        raise BenchError(f"--model {mix.model}: the server has {', '.join(each.id for each in models)}", 2)
    mix = replace(mix, model=model.id)
    context = model.max_model_len
    if context is None:
        return replace(mix, output=mix.output or LONGEST_OUTPUT)
    room = context - DECODER_PROMPT
    if mix.inject_len + 1 > context or room < FIRST_EVENTS:
        raise BenchError(f"--inject-len {mix.inject_len}: the model's context holds {context} tokens", 2)
    if mix.output > room:
        raise BenchError(f"--out {mix.output}: beside a prompt of {DECODER_PROMPT} the context holds {room}", 2)
    return replace(mix, output=mix.output or min(LONGEST_OUTPUT, room))


# ------------------------------ what is told


def _short(value: float | None) -> str:
    """Three digits or more: a row fits on a terminal of 80 columns."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _print(console: rich.console.Console, mix: Mix, phases: Sequence[Phase]) -> None:
    console.print(f"{mix.model}: {mix.decoders} decoders; times in ms", highlight=False, markup=False)
    table = rich.table.Table(box=rich.box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("prompts", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for phase in phases:
        row = figures(mix, phase)
        what = f"{mix.inject_len} tokens at {mix.qps:g}/s" if phase.name == "injected" else "none"
        table.add_row(what, *(_short(row[key]) for key in COLUMNS.values()))
    console.print(table)
    if phases[-1].alive < mix.decoders:
        console.print(
            f"Only {phases[-1].alive} of {mix.decoders} decoders were left at the end: the figures flatter. "
            "Raise --out, or lower --n or --seconds; where the server ran short of KV pages (it counts preemptions), "
            "give it more --kv-cache-memory, or lower --decoders or --out.",
            style="bold",
            highlight=False,
        )


def _write(files: Files, url: str, mix: Mix, phases: Sequence[Phase]) -> None:
    """Raises BenchError (2) when a file can't be written."""
    out: dict[Path, str] = {}
    if files.json is not None:
        out[files.json] = json.dumps(_shape(url, mix, phases), indent=1) + "\n"
    if files.plot is not None:
        try:
            out[files.plot] = render_svg(draw(url, mix, phases))
        except ValueError as error:
            raise BenchError(str(error)) from error
    for path, text in out.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BenchError(f"{path} can't be written: {error.strerror}", 2) from error
        sys.stdout.write(f"written: {path}\n")


def _shape(url: str, mix: Mix, phases: Sequence[Phase]) -> dict[str, Any]:
    rows = [figures(mix, phase, phase.name) for phase in phases]
    return {"greenlane": version("greenlane"), "url": url, "load": asdict(mix), "rows": rows}
