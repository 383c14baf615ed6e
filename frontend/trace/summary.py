"""What a step log says in figures: how long steps and prefills took, and how much they overlapped.

Owns the definitions; each is written at its field. Prints a table for people and a JSON object for programs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import rich.box
import rich.console
import rich.table

from frontend.trace.read import Complete, Decode, Join, Run


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `count` values; None where there are none."""

    count: int
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls(0, None, None)
        p50, p99 = (round(float(value), 3) for value in np.percentile(values, [50, 99]))
        return cls(len(values), p50, p99)


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Batches on the prefill lane with up to `tokens` tokens, and more than half of that."""

    tokens: int
    count: int
    ms_p50: float
    ms_max: float
    inside_min: int
    """Decode steps that completed between a batch's start and its end, at least …"""
    inside_median: float
    """… and in the median."""


@dataclass(frozen=True, slots=True)
class Summary:
    steps: int
    """On the primary lane."""
    decode_alone_ms: Spread
    """Steps of decode rows only, with no batch on the prefill lane."""
    decode_beside_ms: Spread
    """Such steps with a batch on the prefill lane, at their launch or at any time of their run."""
    mixed_ms: Spread
    """Steps with decode rows and chunks in the primary lane's forward."""
    chunks_alone_ms: Spread
    """Those with chunks and no decode row."""
    prefill_launches: int
    prefills: list[PrefillRow]
    inside_min: int | None
    """As in the rows, over all batches."""
    inside_median: float | None
    gpu_idle_us: Spread
    """The primary lane empty before a step with decode rows: from the end of the work before it to its start."""
    host_us: Spread
    """The worker's time to enqueue a plan that holds work."""
    failed: int
    dropped: int
    """Lines that are missing because the file was too slow."""
    unreadable: int


def summarize(run: Run) -> Summary:
    decodes, prefills = sorted(run.decodes, key=lambda step: step.start), run.prefills
    plain = [step for step in decodes if step.decode_rows and not step.chunk_tokens]
    beside = beside_prefill(plain, prefills)
    inside = completions_inside(decodes, prefills)
    return Summary(
        steps=len(decodes),
        decode_alone_ms=Spread.of([_ms(step) for step in plain if step.step not in beside]),
        decode_beside_ms=Spread.of([_ms(step) for step in plain if step.step in beside]),
        mixed_ms=Spread.of([_ms(step) for step in decodes if step.chunk_tokens and step.decode_rows]),
        chunks_alone_ms=Spread.of([_ms(step) for step in decodes if step.chunk_tokens and not step.decode_rows]),
        prefill_launches=len(run.prefill_launches),
        prefills=_rows(prefills, inside),
        inside_min=min(inside, default=None),
        inside_median=float(np.median(inside)) if inside else None,
        gpu_idle_us=Spread.of(_gaps(run, decodes)),
        host_us=Spread.of([plan.host_us for plan in run.launches if plan.decode_rows or plan.chunk_tokens]),
        failed=len(run.failures),
        dropped=run.dropped,
        unreadable=run.unreadable,
    )


def beside_prefill(steps: Sequence[Decode], prefills: Sequence[Complete]) -> set[int]:
    """Numbers of the steps that ran, in part at least, while a batch was on the prefill lane."""
    batches = sorted(prefills, key=lambda batch: batch.start)  # one at a time, so their ends are in order too
    ends = [batch.end for batch in batches]
    beside: set[int] = set()
    for step in steps:
        place = bisect_right(ends, step.start)
        if step.beside or (place < len(batches) and batches[place].start < step.end):
            beside.add(step.step)
    return beside


def completions_inside(steps: Sequence[Decode], prefills: Sequence[Complete]) -> list[int]:
    """For each batch, how many steps with decode rows completed between its start and its end."""
    ends = sorted(step.end for step in steps if step.decode_rows)
    return [bisect_right(ends, batch.end) - bisect_left(ends, batch.start) for batch in prefills]


def _ms(work: Decode | Complete) -> float:
    return (work.end - work.start) / 1e3


def _rows(prefills: Sequence[Complete], inside: Sequence[int]) -> list[PrefillRow]:
    groups: dict[int, list[tuple[float, int]]] = {}
    for batch, count in zip(prefills, inside, strict=True):
        bound = 1 << max(batch.chunk_tokens - 1, 0).bit_length()
        groups.setdefault(bound, []).append((_ms(batch), count))
    rows = []
    for bound in sorted(groups):
        times, counts = zip(*groups[bound], strict=True)
        p50, longest = round(float(np.median(times)), 3), round(max(times), 3)
        rows.append(PrefillRow(bound, len(times), p50, longest, min(counts), float(np.median(counts))))
    return rows


def _gaps(run: Run, decodes: Sequence[Decode]) -> list[float]:
    """A step's decode rows were there before it, so time without work ahead of it is time lost."""
    gaps: list[float] = []
    busy_until: float | None = None
    works: list[Decode | Join] = [*decodes, *run.joins]
    for work in sorted(works, key=lambda work: work.start):
        if busy_until is not None and isinstance(work, Decode) and work.decode_rows:
            gaps.append(max(0.0, work.start - busy_until))
        busy_until = work.end if busy_until is None else max(busy_until, work.end)
    return gaps


# ------------------------------ for people and programs


def as_json(run: Run, summary: Summary) -> dict[str, Any]:
    """The summary with what it is about, flat enough to be a line of a table of runs."""
    about = {key: getattr(run.header, key) for key in ("model", "device", "overlap", "decode_sms", "prefill_sms")}
    out: dict[str, Any] = {"greenlane": run.header.greenlane, **about, "clock": run.header.clock}
    for key, value in asdict(summary).items():
        if isinstance(getattr(summary, key), Spread):
            out |= {f"{key}_{part}": value[part] for part in ("p50", "p99")}
        else:
            out[key] = value
    return out


def print_summary(console: rich.console.Console, run: Run, summary: Summary) -> None:
    head = run.header
    split = run.split()
    sms = f" · {split}" if split else ""
    title = f"{head.model} on {head.device}, overlap {head.overlap}{sms}, times of the {head.clock}"
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    table = rich.table.Table(box=rich.box.SIMPLE)
    for column in ("", "count", "p50", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    for name, spread in (
        ("decode alone, ms", summary.decode_alone_ms),
        ("decode beside a prefill, ms", summary.decode_beside_ms),
        ("decode and chunks in one forward, ms", summary.mixed_ms),
        ("chunks alone, ms", summary.chunks_alone_ms),
        ("primary lane idle before a step, µs", summary.gpu_idle_us),
        ("host per step (on cpu the forward itself), µs", summary.host_us),
    ):
        table.add_row(name, str(spread.count), _figure(spread.p50), _figure(spread.p99))
    console.print(table)
    if summary.prefills:
        console.print(_prefill_table(summary))
    for count, what in (
        (summary.failed, "work that failed"),
        (summary.dropped, "lines dropped because the file was slower than the worker"),
        (summary.unreadable, "lines that can't be read"),
    ):
        if count:
            console.print(f"{what}: {count}")


def _prefill_table(summary: Summary) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE, title="prefill lane", title_justify="left")
    for column in ("tokens up to", "batches", "ms p50", "ms max", "decode steps inside: min", "median"):
        table.add_column(column, justify="right")
    for row in summary.prefills:
        inside = (str(row.inside_min), f"{row.inside_median:g}")
        table.add_row(str(row.tokens), str(row.count), _figure(row.ms_p50), _figure(row.ms_max), *inside)
    return table


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"
