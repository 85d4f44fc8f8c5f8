"""Line charts as SVG: plain text, so that a report is one file that opens anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 60, 180, 10, 40
"""Margins, in pixels as all else: numbers on the left, names on the right."""

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """Points from left to right; lines of the same `color` number belong together, and are named once."""

    name: str
    color: int
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over two axes, both from 0."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def to_svg(chart: Chart) -> str:
    """The drawing; every text in it is escaped. Raises ValueError if there is no point."""
    x_max = max(x for line in chart.lines for x, _ in line.points) or 1.0
    y_max = max(y for line in chart.lines for _, y in line.points) or 1.0
    parts = [*_axes(chart, x_max, y_max), *_lines(chart, x_max, y_max), *_names(chart)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    return "\n".join([head, f"<title>{escape(chart.title)}</title>", *parts, "</svg>"])


def _axes(chart: Chart, x_max: float, y_max: float) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in range(TICKS + 1):
        x, y = LEFT + (right - LEFT) * tick / TICKS, bottom - (bottom - TOP) * tick / TICKS
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>',
            _text(LEFT - 6, y + 4, f"{y_max * tick / TICKS:.4g}", "end"),
            _text(x, bottom + 16, f"{x_max * tick / TICKS:.4g}", "middle"),
        ]
    middle = (TOP + bottom) / 2
    label = _text(14, middle, chart.y_label, "middle", f' transform="rotate(-90 14 {middle})"')
    return [*parts, _text((LEFT + right) / 2, HEIGHT - 6, chart.x_label, "middle"), label]


def _lines(chart: Chart, x_max: float, y_max: float) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for line in chart.lines:
        points = " ".join(
            f"{LEFT + (right - LEFT) * x / x_max:.1f},{bottom - (bottom - TOP) * y / y_max:.1f}" for x, y in line.points
        )
        color = COLORS[line.color % len(COLORS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    return parts


def _names(chart: Chart) -> list[str]:
    names = {line.name: line.color for line in chart.lines}
    parts = []
    for number, (name, color) in enumerate(names.items()):
        x, y, fill = WIDTH - RIGHT + 12, TOP + 12 + 18 * number, COLORS[color % len(COLORS)]
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{fill}"/>')
        parts.append(_text(x + 16, y, name, "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11"{extra}>{escape(text)}</text>'
