"""A scene as SVG: one file without references, light or dark as the reader's system is.

Owns the markup alone.
"""

from __future__ import annotations

from html import escape

from frontend.trace.scene import PALETTE, Line, Rect, Scene, Text

FONTS = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


def render_svg(scene: Scene) -> str:
    size = f'width="{scene.width:g}" height="{scene.height:g}" viewBox="0 0 {scene.width:g} {scene.height:g}"'
    body = [_shape(shape) for shape in scene.shapes]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONTS}">',
            f"<title>{escape(scene.title)}</title>",
            f"<style>{_style(0)}@media (prefers-color-scheme: dark) {{{_style(1)}}}</style>",
            '<rect class="surface" width="100%" height="100%" rx="6"/>',
            *body,
            "</svg>\n",
        ]
    )


def _style(theme: int) -> str:
    """Fills, and strokes for lines, of one theme."""
    colours = [f".{role}{{fill:{colours[theme]};stroke:none}}" for role, colours in PALETTE.items()]
    return "".join([*colours, f"line.grid{{stroke:{PALETTE['grid'][theme]};stroke-width:1}}"])


def _shape(shape: Rect | Line | Text) -> str:
    match shape:
        case Rect(x, y, width, height, role, title):
            place = f'x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}"'
            inner = f"><title>{escape(title)}</title></rect>" if title else "/>"
            return f'<rect class="{role}" {place}{inner}'
        case Line(x1, y1, x2, y2, role):
            return f'<line class="{role}" x1="{x1:.2f}" y1="{y1:g}" x2="{x2:.2f}" y2="{y2:g}"/>'
        case Text(x, y, text, role, size, anchor):
            place = f'x="{x:.2f}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
            return f'<text class="{role}" {place}>{escape(text)}</text>'
