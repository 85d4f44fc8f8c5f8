"""Charts of a report's rows in one style, as SVG for a page and as PNG.

Drawn small, so that their text stays readable where a page is 400 px wide; a wide page scales them up. Only
Matplotlib's object API is used: there is no state that two charts share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.typing import RcKeyType

from loadgen.report.report import Chart
from loadgen.report.tables import Row, Table

WIDTH_IN, HEIGHT_IN = 5.0, 3.4
PNG_DPI = 200
LEGEND_CHARACTERS, LEGEND_SAMPLE = 48, 6
"""About as many characters fit beside each other, the sample of each line being as wide as so many."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito, "Color Universal Design" (2008), without black and without the yellow that white paper swallows."""
STYLES = ("-", "--", ":")
"""One for each time round the colours."""
INK = "#1b1f24"
"""Of text and axes; on a page it becomes the colour of the page's text."""
RULES: dict[RcKeyType, Any] = {
    "font.size": 10.5,
    "font.family": "sans-serif",
    "text.parse_math": False,  # a dollar sign in a target's name is a dollar sign
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "loadgen",
}
BARS_WIDTH = 0.8
FEWEST_GROUPS = 3
"""For which there is room anyway: a single bar would fill the drawing."""
BARS_CHARACTERS = 60
"""About as many fit below an axis in a line."""
DECADES_WITH_STEPS = 2.5
"""A logarithmic axis no longer than this has ticks at 1, 2 and 5, a longer one at powers of ten."""


def to_svg(chart: Chart, tables: Sequence[Table], prefix: str = "chart") -> str:
    """The drawing as an `<svg>` element that needs nothing else, its text as text, in the colour of the text around it.

    Ids in it begin with `prefix`: give each chart of a page its own.
    """
    buffer = StringIO()
    with mpl.rc_context(RULES):
        _draw(chart, tables).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :].replace(INK, "currentColor").strip()
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", drawing)


def to_png(chart: Chart, tables: Sequence[Table], path: Path) -> None:
    """Write the drawing, with its title, on white. Raises OSError."""
    with mpl.rc_context(RULES):
        drawing = _draw(chart, tables)
        drawing.suptitle(chart.title, fontsize=11)
        drawing.savefig(path, format="png", dpi=PNG_DPI)


def _draw(chart: Chart, tables: Sequence[Table]) -> Drawing:
    drawing = Drawing(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    axes, rows = drawing.subplots(), chart.rows(tables)
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(str(row.get(chart.by, "")), []).append(row)
    if chart.kind in ("bars", "stack"):
        _draw_bars(axes, chart, series)
    else:
        _draw_curves(axes, chart, series)
        _label_axes(axes, chart)
    for name, value in chart.levels.items():
        axes.axhline(value, label=_named(name), color=INK, linestyle="--", linewidth=1.2)
    for value in chart.marks:
        axes.axvline(value, color=INK, linewidth=0.5, alpha=0.3)
    if chart.levels and not chart.log_y:
        axes.set_ylim(bottom=0, top=1.05 * max(axes.get_ylim()[1], *chart.levels.values()))
    _add_legend(drawing, axes)
    return drawing


def _numbers(rows: Sequence[Row], name: str) -> list[float]:
    return [value for row in rows if isinstance(value := row.get(name), int | float)]


def _draw_curves(axes: Axes, chart: Chart, series: Mapping[str, Sequence[Row]]) -> None:
    if chart.kind == "areas":
        xs = sorted({value for rows in series.values() for value in _numbers(rows, chart.x)})
        heights = [_numbers(rows, chart.y) for rows in series.values()]
        axes.stackplot(xs, heights, labels=list(map(_named, series)), colors=COLORS, step="post", alpha=0.85)
        return
    for place, (name, rows) in enumerate(series.items()):
        style: dict[str, Any] = {"label": _named(name), "color": COLORS[place % len(COLORS)]}
        style["linestyle"] = STYLES[place // len(COLORS) % len(STYLES)]
        if chart.kind == "cdf":
            axes.ecdf(_numbers(rows, chart.x), **style)
        elif chart.kind == "steps":
            axes.plot(_numbers(rows, chart.x), _numbers(rows, chart.y), drawstyle="steps-post", **style)
        else:
            marker = "o" if len(rows) < 30 else ""
            axes.plot(_numbers(rows, chart.x), _numbers(rows, chart.y), marker=marker, markersize=4, **style)


def _draw_bars(axes: Axes, chart: Chart, series: Mapping[str, Sequence[Row]]) -> None:
    """For each group a bar of each series, beside each other or stacked; a series lacks groups that it has no row
    of.
    """
    groups = list(dict.fromkeys(str(row[chart.x]) for rows in series.values() for row in rows))
    floor = dict.fromkeys(groups, 0.0)
    stacked = chart.kind == "stack"
    width = BARS_WIDTH if stacked else BARS_WIDTH / max(1, len(series))
    for place, (name, rows) in enumerate(series.items()):
        found = dict(zip((str(row[chart.x]) for row in rows), _numbers(rows, chart.y), strict=True))
        shift = 0.0 if stacked else (place - (len(series) - 1) / 2) * width
        places = [groups.index(group) + shift for group in found]
        bottoms = [floor[group] if stacked else 0.0 for group in found]
        axes.bar(
            places, list(found.values()), width, bottom=bottoms, label=_named(name), color=COLORS[place % len(COLORS)]
        )
        for group, value in found.items():
            floor[group] += value
    axes.set_xticks(range(len(groups)), groups)
    spare = max(0.0, (FEWEST_GROUPS - len(groups)) / 2)
    axes.set_xlim(-0.6 - spare, len(groups) - 0.4 + spare)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.log_y:
        axes.set_yscale("log")
        _label_decades(axes.yaxis)
    if max(map(len, groups), default=0) * len(groups) > BARS_CHARACTERS:
        axes.tick_params(axis="x", labelrotation=30)


def _label_axes(axes: Axes, chart: Chart) -> None:
    """Name the axes; linear ones begin at 0 unless a value is below."""
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel("share at most that" if chart.kind == "cdf" else chart.y_label)
    for axis, log in ((axes.xaxis, chart.log_x), (axes.yaxis, chart.log_y)):
        if log:
            (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
            _label_decades(axis)
    if not chart.log_x and axes.dataLim.x0 >= 0:
        axes.set_xlim(left=0)
    if not chart.log_y and axes.dataLim.y0 >= 0:
        axes.set_ylim(bottom=0, top=1.02 if chart.kind == "cdf" else None)


def _label_decades(axis: Axis) -> None:
    """Plain numbers: Matplotlib's own powers of ten are written in its formula language, which is switched off."""
    low, high = axis.get_view_interval()
    short = high < low * 10**DECADES_WITH_STEPS
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if short else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _named(name: str) -> str:
    """Matplotlib leaves names that begin with an underscore out of the legend."""
    return f" {name}" if name.startswith("_") else name


def _add_legend(drawing: Drawing, axes: Axes) -> None:
    """Below the axes, where it hides nothing; each name once, and none for a single one."""
    handles, names = axes.get_legend_handles_labels()
    named = dict(zip(names, handles, strict=True))
    if len(named) < 2:
        return
    widths = [len(name) + LEGEND_SAMPLE for name in named]
    columns = len(named) if sum(widths) <= LEGEND_CHARACTERS else max(1, LEGEND_CHARACTERS // max(widths))
    drawing.legend(list(named.values()), list(named), loc="outside lower center", ncols=columns, fontsize=10)
