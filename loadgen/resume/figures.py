"""The crossover, drawn: how long each way takes against depth, and how much sooner Djinn is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes

from loadgen.reporting.figures import INK, Figure, color_of
from loadgen.reporting.plots import Series, label_axes, level, lines
from loadgen.resume.findings import Way
from loadgen.resume.report import TargetReport
from loadgen.resume.summary import Measure, Row

DEPTH = "depth of the pause, % of layers"
NAMES = {Way.RECOMPUTE: "recompute", Way.OFFLOAD: "hand-written", Way.DJINN: "Djinn"}
"""Short enough for a legend on a narrow page."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WORDS = {
    Measure.STANDING: "Until the model stands at the layer again",
    Measure.TOKEN: "Until the next token",
}
CAPTION = (
    "Medians. A colour for each way, a marker for each length. Where Djinn's line is below that of a recompute of the "
    "same length, coming back is sooner than computing again."
)


def figures(target: TargetReport) -> Iterator[Figure]:
    """For both measures: all ways, and what a recompute takes longer."""
    for measure in Measure:
        rows = [row for row in target.summary.rows if row.seconds(measure) is not None]
        if rows:
            yield Figure(
                f"{WORDS[measure]}: {target.server.name}", CAPTION, partial(_draw_ways, rows=rows, measure=measure)
            )
    for measure in Measure:
        series = _speed_ups(target, measure)
        if series:
            yield Figure(
                f"Recompute over Djinn, {measure.value}: {target.server.name}",
                "How many times as long a recompute takes, medians. Above the dashed line Djinn is sooner.",
                partial(_draw_speed_ups, series=series),
            )


def _draw_ways(axes: Axes, rows: Sequence[Row], measure: Measure) -> None:
    lengths = list(dict.fromkeys(row.length for row in rows))
    for number, way in enumerate(Way):
        for length, marker in zip(lengths, MARKERS, strict=False):
            points = [
                (row.depth, 1000 * spread.median)
                for row in rows
                if (row.way, row.length) == (way, length) and (spread := row.seconds(measure)) is not None
            ]
            if points:
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, color=color_of(number), marker=marker, markersize=4.5, linewidth=1.4)
    present = {row.way for row in rows}
    for number, way in enumerate(Way):
        if way in present:
            axes.plot([], [], color=color_of(number), label=NAMES[way])
    for length, marker in zip(lengths, MARKERS, strict=False):
        axes.plot([], [], color=INK, linestyle="", marker=marker, markersize=4.5, label=f"{length:,} tokens")
    label_axes(axes, DEPTH, "milliseconds", log_y=True)
    axes.set_xlim(0, 102)


def _speed_ups(target: TargetReport, measure: Measure) -> list[Series]:
    found = [each for each in target.summary.comparisons if (each.measure, each.way) == (measure, Way.RECOMPUTE)]
    return [
        Series(f"{length:,} tokens", [(each.depth, each.ratio.median) for each in found if each.length == length])
        for length in dict.fromkeys(each.length for each in found)
    ]


def _draw_speed_ups(axes: Axes, series: Sequence[Series]) -> None:
    lines(axes, series, DEPTH, "times as long", log_y=True, markers=True)
    level(axes, 1.0, "as long as Djinn")
    axes.set_xlim(0, 102)
