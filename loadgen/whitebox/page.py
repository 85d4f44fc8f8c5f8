"""The report as one HTML file, with its plots in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment

from loadgen.report import machine, result_path
from loadgen.whitebox.chart import Chart, Line, to_svg
from loadgen.whitebox.findings import Waited
from loadgen.whitebox.report import EXPERIMENT, TargetReport, WhiteboxReport
from loadgen.whitebox.tables import tables
from loadgen.whitebox.verdicts import Outcome

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Djinn: the white-box experiment</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin-bottom: 1.5rem }
td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left; padding-left: 0 }
.met { color: #176f2c } .missed { color: #b3001b; font-weight: bold }
</style>
<h1>The white-box experiment</h1>
<p>{{ started }}, on {{ machine.platform }}, {{ machine.cpus }} CPUs.
{{ plan.sequences }} sequences of {{ plan.context }} + {{ plan.tokens }} tokens, greedy; steering by {{ plan.scale }};
{{ plan.others }} others beside a pause of {{ "%g"|format(plan.pause_seconds) }} s.</p>
{% for target in targets %}
<h2>{{ target.name }}: {{ target.url }}</h2>
{% for chart in target.charts %}<h3>{{ chart.title }}</h3>
{{ chart.svg|safe }}
{% endfor %}
{% for table in target.tables %}<h3>{{ table.title }}</h3>
<table>
<tr>{% for cell in table.header %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr>
{% for cell in row %}
<td{% if cell in outcomes %} class="{{ cell }}"{% endif %}>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</table>
{% endfor %}
{% endfor %}
</html>
"""

PLOTTED = (Waited.RESUME, Waited.TOKEN)


def write_page(report: WhiteboxReport, folder: Path) -> Path:
    """Write the report to a new file in `folder`, named after the experiment and its start; returns its path."""
    path = result_path(folder, EXPERIMENT, report.started_at, "html")
    template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    text = template.render(
        started=f"{report.started_at:%Y-%m-%d %H:%M} UTC",
        machine=machine(),
        plan=report.plan,
        outcomes=[outcome.value for outcome in Outcome],
        targets=[_target(target) for target in report.targets],
    )
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


def _target(target: TargetReport) -> dict[str, object]:
    drawn = [chart for chart in (_throughput(target), _round_trips(target)) if chart.lines]
    return {
        "name": target.spec.name,
        "url": target.spec.url,
        "charts": [{"title": chart.title, "svg": to_svg(chart)} for chart in drawn],
        "tables": list(tables(target)),
    }


def _throughput(target: TargetReport) -> Chart:
    names = {True: "one session paused", False: "none paused"}
    lines = [
        Line(names[window.paused], int(window.paused), points)
        for window in target.findings.windows
        if (points := [(second + 0.5, float(count)) for second, count in enumerate(window.tokens)])
    ]
    return Chart("Throughput of the others, second by second", "seconds", "tokens/s", lines)


def _round_trips(target: TargetReport) -> Chart:
    return Chart(
        "A token with a pause in its pass, and one without",
        "milliseconds, seen by the client",
        "share of tokens that took no longer",
        list(_shares(target)),
    )


def _shares(target: TargetReport) -> Iterator[Line]:
    """From the fastest to the 99th percentile: a single straggler would squeeze all others into a corner."""
    for color, waited in enumerate(PLOTTED):
        trips = target.findings.round_trips
        seconds = sorted(trip.seconds for trip in trips if trip.waited is waited and trip.positions == 1)
        shown = seconds[: max(1, len(seconds) * 99 // 100)] if seconds else []
        points = [(1000 * value, (rank + 1) / len(seconds)) for rank, value in enumerate(shown)]
        if points:
            yield Line(waited.value, color, points)
