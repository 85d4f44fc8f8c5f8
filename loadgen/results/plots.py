"""Kinds of plot: each draws on the axes of a `Figure`. Series get their colours by their number, in the order given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from loadgen.results.figures import INK, color_of, style_of

BARS_WIDTH = 0.8
FEWEST_GROUPS = 3
"""For which there is room anyway: a single bar would fill the drawing."""

BARS_CHARACTERS = 60
"""About as many fit below an axis in a line."""

DECADES_WITH_STEPS = 2.5
"""A logarithmic axis no longer than this has ticks at 1, 2 and 5, a longer one at powers of ten."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points from left to right. `color` is its number if that is not its place among the others."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int | None = None


def lines(
    axes: Axes,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    steps: bool = False,
    markers: bool = False,
) -> None:
    """Lines through points, or `steps` that hold their height until the next point."""
    for place, one in enumerate(series):
        number = place if one.color is None else one.color
        xs, ys = [x for x, _ in one.points], [y for _, y in one.points]
        axes.plot(
            xs,
            ys,
            label=_named(one.name),
            color=color_of(number),
            linestyle=style_of(number),
            drawstyle="steps-post" if steps else "default",
            marker="o" if markers else "",
            markersize=4,
        )
    label_axes(axes, x_label, y_label, log_x=log_x, log_y=log_y)


def cdf(axes: Axes, samples: Mapping[str, Sequence[float]], x_label: str, *, log: bool = False) -> None:
    """For each value, which share of the samples is at most that. Names without samples keep their colour."""
    for number, (name, values) in enumerate(samples.items()):
        if values:
            axes.ecdf(values, label=_named(name), color=color_of(number), linestyle=style_of(number))
    label_axes(axes, x_label, "share at most that", log_x=log)
    axes.set_ylim(0, 1.02)


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    y_label: str,
    *,
    stacked: bool = False,
) -> None:
    """For each group a bar of each series, beside each other or `stacked`; None is no bar. Series without any keep
    their colour.
    """
    floor = [0.0] * len(groups)
    shown = [(color_of(number), *each) for number, each in enumerate(series.items()) if set(each[1]) != {None}]
    width = BARS_WIDTH if stacked else BARS_WIDTH / max(1, len(shown))
    for column, (color, name, values) in enumerate(shown):
        heights = [value or 0.0 for value in values]
        shift = 0.0 if stacked else (column - (len(shown) - 1) / 2) * width
        places = [place + shift for place in range(len(groups))]
        axes.bar(places, heights, width, bottom=floor, label=_named(name), color=color)
        if stacked:
            floor = [below + height for below, height in zip(floor, heights, strict=True)]
    axes.set_xticks(range(len(groups)), groups)
    spare = max(0.0, (FEWEST_GROUPS - len(groups)) / 2)
    axes.set_xlim(-0.6 - spare, len(groups) - 0.4 + spare)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel(y_label)
    if max(map(len, groups), default=0) * len(groups) > BARS_CHARACTERS:
        axes.tick_params(axis="x", labelrotation=30)


def areas(axes: Axes, xs: Sequence[float], series: Mapping[str, Sequence[float]], x_label: str, y_label: str) -> None:
    """Parts of a whole over time, on top of each other; each value holds until the next."""
    axes.stackplot(
        xs,
        list(series.values()),
        labels=[_named(name) for name in series],
        colors=[color_of(number) for number in range(len(series))],
        step="post",
        alpha=0.85,
    )
    label_axes(axes, x_label, y_label)


def level(axes: Axes, y: float, name: str) -> None:
    """A horizontal line to hold the others against."""
    axes.axhline(y, label=_named(name), color=INK, linestyle="--", linewidth=1.2)


def label_axes(axes: Axes, x_label: str, y_label: str, *, log_x: bool = False, log_y: bool = False) -> None:
    """Name the axes; linear ones begin at 0 unless a value is below."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    for axis, log in ((axes.xaxis, log_x), (axes.yaxis, log_y)):
        if log:
            (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
            _label_decades(axis)
    if not log_x and axes.dataLim.x0 >= 0:
        axes.set_xlim(left=0)
    if not log_y and axes.dataLim.y0 >= 0:
        axes.set_ylim(bottom=0)


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
