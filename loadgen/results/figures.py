"""Figures in one style, as SVG for a page and as PNG.

Drawn small, so that their text stays readable where a page is 400 px wide; a wide page scales them up. Only
Matplotlib's object API is used: there is no state that two figures share.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.typing import RcKeyType

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


@dataclass(frozen=True, slots=True)
class Figure:
    """What is to be drawn on a pair of axes, and the words above and below it."""

    title: str
    caption: str
    draw: Callable[[Axes], None]

    @property
    def slug(self) -> str:
        """The title as a part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def color_of(number: int) -> str:
    """The colour of the target (or other series) of that number, counted in the order of the command line."""
    return COLORS[number % len(COLORS)]


def style_of(number: int) -> str:
    """Its line style: colours that come round again are told apart by it."""
    return STYLES[number // len(COLORS) % len(STYLES)]


def to_svg(figure: Figure, prefix: str = "figure") -> str:
    """The drawing as an `<svg>` element that needs nothing else, its text as text, in the colour of the text around it.

    Ids in it begin with `prefix`: give each figure of a page its own.
    """
    buffer = StringIO()
    with mpl.rc_context(RULES):
        _draw(figure).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :].replace(INK, "currentColor").strip()
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", drawing)


def to_png(figure: Figure, path: Path) -> None:
    """Write the drawing, with its title, on white. Raises OSError."""
    with mpl.rc_context(RULES):
        drawing = _draw(figure)
        drawing.suptitle(figure.title, fontsize=11)
        drawing.savefig(path, format="png", dpi=PNG_DPI)


def _draw(figure: Figure) -> Drawing:
    drawing = Drawing(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    axes = drawing.subplots()
    figure.draw(axes)
    _add_legend(drawing, axes)
    return drawing


def _add_legend(drawing: Drawing, axes: Axes) -> None:
    """Below the axes, where it hides nothing; each name once, and none for a single one."""
    handles, names = axes.get_legend_handles_labels()
    named = dict(zip(reversed(names), reversed(handles), strict=True))
    if len(named) < 2:
        return
    ordered = {name: named[name] for name in names}
    widths = [len(name) + LEGEND_SAMPLE for name in ordered]
    columns = len(ordered) if sum(widths) <= LEGEND_CHARACTERS else max(1, LEGEND_CHARACTERS // max(widths))
    drawing.legend(list(ordered.values()), list(ordered), loc="outside lower center", ncols=columns, fontsize=10)
