"""The run as one HTML page with its drawings, by the load generator's kit: it needs Matplotlib and Jinja."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks.figures import figure_table
from benchmarks.gpu_check.reports.journal import StageRecord
from benchmarks.gpu_check.reports.record import Run, heading, provenance
from loadgen.results.figures import Figure
from loadgen.results.page import Page, Section, write_page, write_pictures
from loadgen.results.plots import Series, lines


@dataclass(frozen=True, slots=True)
class Chart:
    """How the points of a chart are drawn."""

    caption: str
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False


CHARTS = {
    "Pinned copies": Chart("Plain copies between pinned host memory and the device.", "MiB", "GB/s", log_x=True),
    "Back after a layer": Chart(
        "Until the model stands after the layer again, with all KV in place.", "layers that had run", "ms", log_y=True
    ),
    "Streamed weights": Chart("Tokens of all sessions together.", "sessions", "tokens/s", log_x=True, log_y=True),
    "Decode": Chart("Tokens of all sessions together.", "sessions", "tokens/s", log_x=True, log_y=True),
}


def write_files(run: Run, data: Path) -> list[Path]:
    """Write the page and its drawings beside the JSON file `data`, in place of earlier ones; returns their paths."""
    page = make_page(run)
    html = data.with_suffix(".html")
    html.unlink(missing_ok=True)
    return [write_page(page, html), *write_pictures(page, html)]


def make_page(run: Run) -> Page:
    """What the page says."""
    sections = tuple(_section(stage) for stage in run.stages)
    return Page(f"GPU check on {run.device.name}", tuple(provenance(run)), sections, tuple(run.command))


def _section(stage: StageRecord) -> Section:
    shown = (figure_table("", stage.figures),) if stage.figures else ()
    text = " ".join([*(f"{name}: {value}." for name, value in stage.facts.items()), *stage.notes])
    return Section(heading(stage), text, tuple(_drawings(stage)), shown)


def _drawings(stage: StageRecord) -> Iterator[Figure]:
    for title in dict.fromkeys(point.chart for point in stage.points):
        points = [point for point in stage.points if point.chart == title]
        names = dict.fromkeys(point.series for point in points)
        series = [Series(name, [(point.x, point.y) for point in points if point.series == name]) for name in names]
        yield Figure(title, CHARTS[title].caption, partial(_draw, series=series, chart=CHARTS[title]))


def _draw(axes: Axes, *, series: list[Series], chart: Chart) -> None:
    lines(axes, series, chart.x_label, chart.y_label, log_x=chart.log_x, log_y=chart.log_y, markers=True)
