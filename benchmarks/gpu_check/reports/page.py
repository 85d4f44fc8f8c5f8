"""The run as one HTML page with its drawings, by the load generator's kit: it needs Matplotlib and Jinja."""

from pathlib import Path

from benchmarks.gpu_check.reports.journal import StageRecord
from benchmarks.gpu_check.reports.record import Run, heading, provenance
from loadgen.report.charts import Chart
from loadgen.report.page import write_page, write_pictures
from loadgen.report.report import Report
from loadgen.report.tables import Row, Table, figure_table

POINTS = "Points"
CHARTS = {
    title: Chart(title, caption, "lines", POINTS, "x", "y", "series", {"chart": title}, *labels, *logs)
    for title, caption, labels, logs in (
        ("Pinned copies", "Plain copies between pinned host memory and the device.", ("MiB", "GB/s"), (True, False)),
        (
            "Back after a layer",
            "Until the model stands after the layer again, with all KV in place.",
            ("layers that had run", "ms"),
            (False, True),
        ),
        ("Streamed weights", "Tokens of all sessions together.", ("sessions", "tokens/s"), (True, True)),
        ("Decode", "Tokens of all sessions together.", ("sessions", "tokens/s"), (True, True)),
    )
}


def write_files(run: Run, data: Path) -> list[Path]:
    """Write the page and its drawings beside the JSON file `data`, in place of earlier ones; returns their paths."""
    report = make_report(run)
    html = data.with_suffix(".html")
    html.unlink(missing_ok=True)
    return [write_page(report, html), *write_pictures(report, html)]


def make_report(run: Run) -> Report:
    """What the page says."""
    points: list[Row] = [
        {"chart": point.chart, "series": point.series, "x": point.x, "y": point.y}
        for stage in run.stages
        for point in stage.points
    ]
    return Report(
        experiment="gpu-check",
        title=f"GPU check on {run.device.name}",
        lead=tuple(provenance(run)),
        plan=run.plan,
        figures=(),
        tables=(*map(_table, run.stages), Table(POINTS, points, shown=False)),
        charts=tuple(CHARTS.values()),
        command=tuple(run.command),
        machine=run.machine,
        versions=run.versions,
    )


def _table(stage: StageRecord) -> Table:
    text = " ".join([*(f"{name}: {value}." for name, value in stage.facts.items()), *stage.notes])
    return figure_table(heading(stage), stage.figures, text)
