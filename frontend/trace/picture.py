"""The lanes over time, as a scene: the stretch of a step log that shows most, with axis and legend.

Owns the choice of the stretch and the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from frontend.trace.read import Decode, Run
from frontend.trace.scene import Line, Rect, Scene, Text, round_step
from frontend.trace.summary import beside_prefill, completions_inside

WIDTH, LEFT, RIGHT = 1200.0, 178.0, 24.0
TOP, LANE, HOST, GAP, AXIS = 74.0, 46.0, 20.0, 16.0, 34.0
GAP_BETWEEN_BARS = 1.0
MIN_STEPS = 30
"""At least about so many steps are shown."""
ROLES = {
    "decode": "decode step",
    "beside": "decode beside a prefill",
    "mixed": "step with chunks",
    "prefill": "prefill batch",
    "join": "join (draws)",
    "launch": "host enqueues",
    "wait": "host sleeps",
}


def draw(run: Run) -> Scene:
    """Raises ValueError for a run without steps."""
    if not run.decodes:
        raise ValueError("there is no step to draw")
    return _Picture(run, *_stretch(run)).scene()


def _stretch(run: Run) -> tuple[float, float]:
    """(from, to) in µs: around the prefill with most decode steps inside, else around the longest step with chunks
    beside decode rows, else in the middle of the run."""
    steps = run.decodes
    usual = sorted(step.end - step.start for step in steps)[len(steps) // 2]
    mixed = [step for step in steps if step.chunk_tokens and step.decode_rows]
    if run.prefills:
        counts = completions_inside(steps, run.prefills)
        _, batch = max(zip(counts, run.prefills, strict=True), key=lambda pair: (pair[0], pair[1].chunk_tokens))
        start, end = batch.start, batch.end
    elif mixed:
        longest = max(mixed, key=lambda step: step.end - step.start)
        start, end = longest.start, longest.end
    else:
        start, end = steps[len(steps) // 2].start, steps[len(steps) // 2].end
    margin = max(0.35 * (end - start), (MIN_STEPS * usual - (end - start)) / 2)
    return start - margin, end + margin


class _Picture:
    """One stretch of one run, laid out."""

    def __init__(self, run: Run, start: float, end: float) -> None:
        self._run = run
        self._start, self._end = start, end
        self._beside = beside_prefill(run.decodes, run.prefills)
        self._lanes = ["primary", "prefill"] if run.prefill_launches or run.prefills else ["primary"]
        self._used: set[str] = set()

    def _top(self, lane: str) -> float:
        if lane == "host":
            return TOP + len(self._lanes) * (LANE + GAP)
        return TOP + self._lanes.index(lane) * (LANE + GAP)

    def _x(self, us: float) -> float:
        span = (us - self._start) / (self._end - self._start)
        return LEFT + min(max(span, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def scene(self) -> Scene:
        axis = self._top("host") + HOST + 8
        scene = Scene(WIDTH, axis + AXIS + 34, self._title())
        scene.shapes += self._head()
        scene.shapes += self._axis(axis)
        scene.shapes += [*self._host(), *self._primary(), *self._prefill()]
        scene.shapes += self._labels()
        scene.shapes += self._legend(axis + AXIS + 16)
        return scene

    # ------------------------------ words

    def _title(self) -> str:
        head = self._run.header
        return f"{head.model} on {head.device}: the lanes over time"

    def _head(self) -> Iterator[Text]:
        head = self._run.header
        split = self._run.split()
        source = "times stamped by the GPU" if head.clock == "gpu" else "times of the host"
        yield Text(24, 32, self._title(), "ink", 17)
        yield Text(24, 53, f"--decode-overlap {head.overlap}{f', {split}' if split else ''} · {source}", "muted", 12.5)

    def _labels(self) -> Iterator[Text]:
        head = self._run.header
        sms = {"primary": head.decode_sms, "prefill": head.prefill_sms} if head.overlap == "green" else {}
        for lane in self._lanes:
            top = self._top(lane)
            yield Text(24, top + LANE / 2 - 1, f"{lane} lane", "ink", 13)
            share = f"{sms[lane]} SMs" if lane in sms else ""
            work = "decode" if len(self._lanes) > 1 else "decode and prefill"
            detail = {"primary": f"{work} · {share} beside" if share else work, "prefill": share or "all SMs"}
            yield Text(24, top + LANE / 2 + 14, detail[lane], "muted", 11)
        yield Text(24, self._top("host") + HOST / 2 + 4, "host", "ink", 13)

    def _axis(self, y: float) -> Iterator[Line | Text]:
        """Ticks at round milliseconds from the stretch's start, none of them crowded."""
        length = (self._end - self._start) / 1e3
        step = round_step(length / 10)
        for place in range(math.floor(length / step) + 1):
            x = self._x(self._start + place * step * 1e3)
            yield Line(x, TOP - 6, x, y, "grid")
            unit = " ms" if place == 0 else ""
            yield Text(x, y + 16, f"{place * step:g}{unit}", "muted", 11, "middle")

    def _legend(self, y: float) -> Iterator[Rect | Text]:
        x = LEFT
        for role, name in ROLES.items():
            if role in self._used:
                yield Rect(x, y - 9, 11, 11, role)
                yield Text(x + 16, y, name, "muted", 11)
                x += 16 + 6.6 * len(name) + 18

    # ------------------------------ bars

    def _bar(self, start: float, end: float, top: float, height: float, role: str, title: str) -> Rect | None:
        """Within the stretch, with a little space behind it; None outside."""
        if end < self._start or start > self._end:
            return None
        x = self._x(start)
        width = self._x(end) - x
        if width <= 0:
            return None
        self._used.add(role)
        return Rect(x, top, max(width - GAP_BETWEEN_BARS, 0.6 * width), height, role, title)

    def _primary(self) -> Iterator[Rect | Text]:
        top = self._top("primary")
        for step in self._run.decodes:
            ms = (step.end - step.start) / 1e3
            title = f"step {step.step}: {step.decode_rows} decode rows, {step.chunk_tokens} chunk tokens, {ms:.2f} ms"
            bar = self._bar(step.start, step.end, top, LANE, self._role(step), title)
            if bar is not None:
                yield bar
                yield from _inside(bar, f"{ms:.1f}")
        for join in self._run.joins:
            title = f"step {join.step} draws for the prefill of step {join.prefill}"
            bar = self._bar(join.start, join.end, top, LANE, "join", title)
            if bar is not None:
                yield bar

    def _role(self, step: Decode) -> str:
        if step.chunk_tokens:
            return "mixed"
        return "beside" if step.step in self._beside else "decode"

    def _prefill(self) -> Iterator[Rect | Text]:
        for batch in self._run.prefills:
            ms = (batch.end - batch.start) / 1e3
            what = f"{batch.chunk_tokens} tokens · {ms:.1f} ms"
            title = f"prefill of step {batch.step}: {batch.rows} rows, {what}"
            bar = self._bar(batch.start, batch.end, self._top("prefill"), LANE, "prefill", title)
            if bar is not None:
                yield bar
                yield from _inside(bar, what)

    def _host(self) -> Iterator[Rect]:
        top = self._top("host")
        bars = [self._bar(w.at, w.at + w.us, top, HOST, "wait", f"asleep for {w.us} µs") for w in self._run.waits]
        bars += [self._bar(i.at, i.at + i.us, top, HOST, "wait", f"asleep for {i.us} µs") for i in self._run.idles]
        for plan in self._run.launches:
            title = f"step {plan.step} enqueued in {plan.host_us} µs"
            bars.append(self._bar(plan.at, plan.at + plan.host_us, top, HOST, "launch", title))
        yield from (bar for bar in bars if bar is not None)


def _inside(bar: Rect, text: str) -> Iterator[Text]:
    """The text in the middle of a bar, where there is room for it."""
    if bar.width > 6.8 * len(text) + 6:
        yield Text(bar.x + bar.width / 2, bar.y + bar.height / 2 + 4, text, "on-fill", 11, "middle")
