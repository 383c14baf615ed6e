"""A scene as PNG (light), drawn and encoded here: rectangles and strokes with smooth edges, then zlib.

Owns the pixels. Format: "Portable Network Graphics", W3C Recommendation, second edition; 8-bit RGB, no interlacing.
"""

from __future__ import annotations

import functools
import struct
import zlib
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from frontend.trace.scene import PALETTE, Line, Rect, Scene, Text
from frontend.trace.strokes import ADVANCE, CAP_HEIGHT, strokes

SCALE = 2
"""Pixels for each px of the scene, each way."""
NARROW = 0.82
"""Width of the glyphs' unit over its height."""
CAPITALS = 0.66
"""Height of capitals over the text's size."""
Pixels = npt.NDArray[np.float32]


def render_png(scene: Scene) -> bytes:
    height, width = round(scene.height * SCALE), round(scene.width * SCALE)
    canvas = np.empty((height, width, 3), np.float32)
    canvas[:] = _colour("surface")
    for shape in scene.shapes:
        match shape:
            case Rect():
                _fill(canvas, shape.x, shape.y, shape.width, shape.height, shape.role)
            case Line():
                # axis-parallel, one px wide
                across, down = abs(shape.x2 - shape.x1) or 1.0, abs(shape.y2 - shape.y1) or 1.0
                _fill(canvas, min(shape.x1, shape.x2), min(shape.y1, shape.y2), across, down, shape.role)
            case Text():
                _write(canvas, shape)
    return encode_png(np.rint(canvas).astype(np.uint8))


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """`pixels`: [height, width, 3]."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _colour(role: str) -> Pixels:
    light = PALETTE[role][0]
    return np.array([int(light[at : at + 2], 16) for at in (1, 3, 5)], np.float32)


def _cover(start: float, length: float, count: int) -> Pixels:
    """How much of each of `count` pixels lies between start and start + length."""
    edges = np.arange(count + 1, dtype=np.float32)
    inside = np.clip(edges, start, start + length)
    return np.diff(inside).astype(np.float32)


def _fill(canvas: Pixels, x: float, y: float, width: float, height: float, role: str) -> None:
    columns = _cover(x * SCALE, width * SCALE, canvas.shape[1])
    rows = _cover(y * SCALE, height * SCALE, canvas.shape[0])
    touched_x, touched_y = np.flatnonzero(columns), np.flatnonzero(rows)
    if len(touched_x) and len(touched_y):
        across = slice(touched_x[0], touched_x[-1] + 1)
        down = slice(touched_y[0], touched_y[-1] + 1)
        _blend(canvas[down, across], np.outer(rows[down], columns[across]), role)


def _blend(region: Pixels, coverage: Pixels, role: str) -> None:
    region += (_colour(role) - region) * coverage[..., None]


def _write(canvas: Pixels, text: Text) -> None:
    """Glyphs on the base line, kept within the canvas."""
    unit = CAPITALS * text.size / CAP_HEIGHT * SCALE
    step = ADVANCE * NARROW * unit
    left = text.x * SCALE - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.anchor] * step * len(text.text)
    top = round(text.y * SCALE - (CAP_HEIGHT + 1) * unit)
    for place, character in enumerate(text.text):
        mask = _glyph(character, unit)
        x = round(left + place * step)
        region = canvas[top : top + mask.shape[0], x : x + mask.shape[1]] if x >= 0 and top >= 0 else canvas[:0]
        if region.shape[:2] == mask.shape:
            _blend(region, mask, text.role)


@functools.cache
def _glyph(character: str, unit: float) -> Pixels:
    """Coverage of one character's strokes; one unit of room above, and around the descenders below."""
    height, width = round(10 * unit), round((ADVANCE + 0.5) * NARROW * unit)
    rows, columns = np.mgrid[0.5:height, 0.5:width].astype(np.float32)
    thickness = 0.85 * unit
    mask = np.zeros((height, width), np.float32)
    for line in strokes(character):
        points = [((x + 0.7) * NARROW * unit, (y + 1) * unit) for x, y in line]
        for (x1, y1), (x2, y2) in pairwise(points):
            distance = _distance(columns, rows, x1, y1, x2, y2)
            mask = np.maximum(mask, np.clip(thickness / 2 + 0.5 - distance, 0, 1))
    return mask


def _distance(x: Pixels, y: Pixels, x1: float, y1: float, x2: float, y2: float) -> Pixels:
    """From each pixel's centre to the segment."""
    along_x, along_y = x2 - x1, y2 - y1
    length = along_x * along_x + along_y * along_y
    place = np.clip(((x - x1) * along_x + (y - y1) * along_y) / length, 0, 1) if length else np.zeros_like(x)
    return np.hypot(x - x1 - place * along_x, y - y1 - place * along_y).astype(np.float32)
