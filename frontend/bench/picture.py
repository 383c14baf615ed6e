"""The decode pace over time, as a scene: gaps between tokens above, the prompts that arrived meanwhile below.

Owns the layout. Time runs over all phases without a break.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from frontend.bench.mix import Mix, Phase, Prompt, gaps_ms
from frontend.trace.scene import Line, Rect, Scene, Shape, Text, round_step

WIDTH, LEFT, RIGHT = 1200.0, 96.0, 24.0
TOP, PLOT, GAP, AXIS = 84.0, 200.0, 30.0, 34.0
BAR, MAX_BARS = 9.0, 12
"""Prompts under way at once are drawn below each other, up to so many."""
BINS = 260
NAMES = {"undisturbed": "no prompts", "injected": "prompts arrive"}


def draw(server: str, mix: Mix, phases: Sequence[Phase]) -> Scene:
    """Raises ValueError for a measurement without two events of one decoder."""
    gaps = [gap for phase in phases for gap in gaps_ms(phase)]
    if not gaps:
        raise ValueError("there is no time between tokens to draw")
    return _Picture(server, mix, phases, gaps).scene()


class _Picture:
    def __init__(self, server: str, mix: Mix, phases: Sequence[Phase], gaps: Sequence[tuple[float, float]]) -> None:
        self._server = server
        self._mix = mix
        self._phases = phases
        self._gaps = gaps
        self._start, self._end = phases[0].began, phases[-1].ended
        self._step = round_step(max(gap for _, gap in gaps) / 5)
        self._most = self._step * math.ceil(max(gap for _, gap in gaps) / self._step)
        self._rows = _beside([prompt for phase in phases for prompt in phase.prompts])

    def scene(self) -> Scene:
        rows = min(MAX_BARS, 1 + max((row for row, _ in self._rows), default=-1))
        axis = TOP + PLOT + (GAP + rows * (BAR + 2) if rows else 0.0) + 8
        title = f"Time between tokens of {self._mix.decoders} decoders while prompts arrive"
        scene = Scene(WIDTH, axis + AXIS + 34, title)
        scene.shapes += [*self._head(title), *self._axes(axis), *self._pace(), *self._prompts()]
        scene.shapes += self._legend(axis + AXIS + 16)
        return scene

    def _x(self, at: float) -> float:
        return LEFT + (at - self._start) / (self._end - self._start) * (WIDTH - LEFT - RIGHT)

    def _y(self, ms: float) -> float:
        return TOP + PLOT * (1 - ms / self._most)

    def _head(self, title: str) -> Iterator[Text]:
        load = f"prompts of {self._mix.inject_len} tokens at {self._mix.qps:g}/s"
        yield Text(24, 32, title, "ink", 17)
        yield Text(24, 53, f"{self._mix.model} at {self._server} · {load}", "muted", 12.5)

    def _axes(self, bottom: float) -> Iterator[Shape]:
        for place in range(round(self._most / self._step) + 1):
            ms = place * self._step
            yield Line(LEFT, self._y(ms), WIDTH - RIGHT, self._y(ms), "grid")
            yield Text(LEFT - 8, self._y(ms) + 4, f"{ms:g}{' ms' if place else ''}", "muted", 11, "end")
        step = round_step((self._end - self._start) / 10)
        for place in range(math.floor((self._end - self._start) / step) + 1):
            x = self._x(self._start + place * step)
            yield Text(x, bottom + 16, f"{place * step:g}{' s' if place == 0 else ''}", "muted", 11, "middle")
        for phase in self._phases:
            yield Line(self._x(phase.began), TOP - 14, self._x(phase.began), bottom, "grid")
            yield Text(self._x(phase.began) + 6, TOP - 8, NAMES[phase.name], "muted", 11.5)

    def _pace(self) -> Iterator[Rect]:
        """Thin bars from a bin's median to its longest gap, and a mark at the median."""
        width = (self._end - self._start) / BINS
        bins: dict[int, list[float]] = {}
        for at, gap in self._gaps:
            bins.setdefault(min(BINS - 1, int((at - self._start) / width)), []).append(gap)
        pixels = (WIDTH - LEFT - RIGHT) / BINS
        for place, gaps in sorted(bins.items()):
            x, middle, most = LEFT + place * pixels, median(gaps), max(gaps)
            title = f"{len(gaps)} gaps, median {middle:.2f} ms, longest {most:.2f} ms"
            height = self._y(middle) - self._y(most)
            yield Rect(x, round(self._y(most), 2), pixels - 1, round(max(height, 1.0), 2), "decode", title)
            yield Rect(x, round(self._y(middle) - 1, 2), pixels - 0.5, 2, "ink")

    def _prompts(self) -> Iterator[Rect | Text]:
        if self._rows:
            yield Text(24, TOP + PLOT + GAP + BAR - 1, "prompts", "ink", 12.5)
        for row, prompt in self._rows:
            if row < MAX_BARS:
                x, y = self._x(prompt.sent), TOP + PLOT + GAP + row * (BAR + 2)
                title = f"{(prompt.first - prompt.sent) * 1e3:.1f} ms to the first token"
                yield Rect(x, y, max(self._x(prompt.first) - x, 1.0), BAR, "prefill", title)

    def _legend(self, y: float) -> Iterator[Rect | Text]:
        x = LEFT
        for role, name in (
            ("ink", "median time between tokens"),
            ("decode", "up to the longest"),
            ("prefill", "a prompt, from sending to its first token"),
        ):
            if role != "prefill" or self._rows:
                yield Rect(x, y - 9, 11, 11, role)
                yield Text(x + 16, y, name, "muted", 11)
                x += 16 + 6.6 * len(name) + 18


def _beside(prompts: Sequence[Prompt]) -> list[tuple[int, Prompt]]:
    """Each with the first row that is free when it is sent."""
    free: list[float] = []
    placed = []
    for prompt in sorted(prompts, key=lambda each: each.sent):
        row = next((row for row, until in enumerate(free) if until <= prompt.sent), len(free))
        free[row : row + 1] = [prompt.first]
        placed.append((row, prompt))
    return placed
