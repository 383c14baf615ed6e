"""A drawing as values: rectangles, lines and texts, each with the role that gives it its colour.

Owns the palette of every role, for light and for dark, and where an axis has its ticks. Renders nothing (`svg.py` and
`png.py` do).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PALETTE: dict[str, tuple[str, str]] = {
    # role: on light, on dark; adjacent fills differ in hue and in lightness
    "surface": ("#fcfcfb", "#1a1a19"),
    "ink": ("#0b0b0b", "#ffffff"),
    "muted": ("#52514e", "#c3c2b7"),
    "grid": ("#dddcd5", "#34342f"),
    "on-fill": ("#ffffff", "#ffffff"),
    "decode": ("#2a78d6", "#3987e5"),
    "beside": ("#12805c", "#199e70"),
    "mixed": ("#4a3aa7", "#7a6ee0"),
    "prefill": ("#c8500f", "#d95926"),
    "join": ("#a8328e", "#c65bb0"),
    "launch": ("#6b6a65", "#8f8d86"),
    "wait": ("#d5d3cb", "#3f3e3a"),
}


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    role: str
    title: str = ""
    """Shown where the pointer rests on it."""


@dataclass(frozen=True, slots=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    role: str


@dataclass(frozen=True, slots=True)
class Text:
    """`y` is the base line; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    role: str
    size: float = 12.0
    anchor: str = "start"


Shape = Rect | Line | Text


@dataclass(slots=True)
class Scene:
    """Shapes in the order in which they are drawn, in px from the upper left corner."""

    width: float
    height: float
    title: str
    shapes: list[Shape] = field(default_factory=list)


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 × 10^n that is no less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))
