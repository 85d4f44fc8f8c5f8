"""The figures, drawn."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes

from loadgen.reporting.figures import Figure
from loadgen.reporting.plots import Series, bars, lines
from loadgen.reporting.units import in_bytes
from loadgen.weights.findings import Way
from loadgen.weights.report import WeightsReport
from loadgen.weights.summary import Measure
from loadgen.weights.tables import MEASURES

FACTORS = {Measure.FIRST: 1e3, Measure.RATE: 1.0, Measure.BANDWIDTH: 1e-9}
UNITS = {Measure.FIRST: "milliseconds", Measure.RATE: "tokens/s", Measure.BANDWIDTH: "GB/s"}
TITLES = {
    Measure.BANDWIDTH: "Bandwidth of the weights",
    Measure.FIRST: "Time to the first token",
    Measure.RATE: "Tokens per second",
}
"""In the order in which they are shown."""

ROOM = 1.2
"""Over the largest value, for what is written beside points."""


def figures(report: WeightsReport) -> Iterator[Figure]:
    """What there is: of a comparison a drawing of each measure, of a sweep one of both sides of the choice."""
    if report.chunks:
        caption = "One session; medians. Each point is a size of copies: up and to the left is better."
        yield Figure("Bandwidth against time to first token", caption, partial(_draw_chunks, report=report))
    for measure, title in TITLES.items():
        series = _series(report, measure)
        if any(value is not None for values in series.values() for value in values):
            caption = f"{MEASURES[measure][0]}; medians."
            yield Figure(title, caption, partial(_draw, report=report, measure=measure, series=series))


def _series(report: WeightsReport, measure: Measure) -> dict[str, list[float | None]]:
    """Of each way, by cell; None where there is none. A way has the same colour in each figure."""
    _, figure, _ = MEASURES[measure]
    found = {(row.way, row.cell): spread.median for row in report.summary.rows if (spread := figure(row)) is not None}
    factor = FACTORS[measure]
    return {
        way.value: [None if (value := found.get((way, cell))) is None else factor * value for cell in report.plan.cells]
        for way in Way
    }


def _draw(axes: Axes, report: WeightsReport, measure: Measure, series: dict[str, list[float | None]]) -> None:
    bars(axes, [str(cell) for cell in report.plan.cells], series, UNITS[measure])


def _draw_chunks(axes: Axes, report: WeightsReport) -> None:
    points = [(1e3 * row.first_s.median, row.bytes_per_s.median / 1e9) for row in report.chunks]
    lines(axes, [Series("Djinn", points)], "time to the first token, milliseconds", "GB/s", markers=True)
    axes.set_xlim(0, ROOM * max(first for first, _ in points))
    axes.set_ylim(0, ROOM * max(bandwidth for _, bandwidth in points))
    for point, row in zip(points, report.chunks, strict=True):
        axes.annotate(in_bytes(row.chunk_bytes), point, textcoords="offset points", xytext=(4, 4), fontsize=9)
