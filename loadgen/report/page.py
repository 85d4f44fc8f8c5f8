"""A report as one HTML file that needs nothing else: charts as SVG in it, readable on a phone, light and dark."""

import csv
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, PackageLoader

from loadgen.report.origin import Server, require_same_flags
from loadgen.report.report import Chart, Report, failure_table, result_path, write_report
from loadgen.report.tables import Cell, Figure, Row, Table, figure_table, mark

TARGETS = "Targets"


def environment() -> Environment:
    """Of the templates beside this file."""
    return Environment(loader=PackageLoader("loadgen.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True)


def shown_tables(report: Report) -> Iterator[Table]:
    """The tables that have something in them: figures with targets first, then what failed, then the experiment's."""
    judged = [each for each in report.figures if each.target is not None]
    yield figure_table(TARGETS, judged)
    yield failure_table(report.failures, interrupted=report.interrupted)
    yield from (table for table in report.tables if table.shown)


def shown_charts(report: Report) -> list[Chart]:
    """The charts that have something in them."""
    return [chart for chart in report.charts if chart.rows(report.tables)]


def write_page(report: Report, path: Path) -> Path:
    """Write the page to a new file; returns `path`. Raises OSError, FileExistsError if the file is there already."""
    from loadgen.report.drawing import to_svg  # Matplotlib need not be where reports are made

    numbers = iter(range(len(report.charts)))
    text = (
        environment()
        .get_template("page.html")
        .render(
            report=report,
            lead=(*report.lead, f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}."),
            command=shlex.join(report.command),
            tables=[table for table in (*shown_tables(report), server_table(report.servers)) if table.rows],
            charts=shown_charts(report),
            mark=mark,
            draw=lambda chart: to_svg(chart, report.tables, f"chart-{next(numbers)}"),
        )
    )
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


def server_table(servers: Sequence[Server]) -> Table:
    """How each server was reached, and started where that is known."""
    rows = [
        {
            "server": server.name,
            "URL": server.url,
            "model": server.model or "Djinn's own protocol",
            "started with": server.started or "not told",
        }
        for server in servers
    ]
    return Table("Servers", rows)


def write_pictures(report: Report, path: Path) -> list[Path]:
    """Write each chart beside the page of that `path`, as PAGE-CHART.png; returns their paths. Raises OSError."""
    from loadgen.report.drawing import to_png

    written: list[Path] = []
    seen: Counter[str] = Counter()
    for chart in shown_charts(report):
        seen[chart.slug] += 1
        again = f"-{seen[chart.slug]}" if seen[chart.slug] > 1 else ""
        written.append(path.with_name(f"{path.stem}-{chart.slug}{again}.png"))
        to_png(chart, report.tables, written[-1])
    return written


def write_outputs(report: Report, folder: Path) -> list[Path]:
    """Write EXPERIMENT-TIME.json, .html, -CHART.png, and .csv if there are raw rows, to `folder`; returns their paths.
    Raises OSError.

    The JSON comes first: everything else can be made from it again.
    """
    data = write_report(report, result_path(folder, report.experiment, report.started_at, "json"))
    html = write_page(report, data.with_suffix(".html"))
    return [data, html, *write_pictures(report, html), *write_csv(report, data.with_suffix(".csv"))]


def write_csv(report: Report, path: Path) -> Iterator[Path]:
    """Write a line for each row of the first table that is not shown, if there is one; gives its path. Raises
    OSError.
    """
    raw = next((table for table in report.tables if not table.shown and table.rows), None)
    if raw is not None:
        with path.open("x", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in raw.rows for name in row)), restval="")
            writer.writeheader()
            writer.writerows(raw.rows)
        yield path


def compared(files: Sequence[str], reports: Sequence[Report]) -> Report:
    """Reports of one experiment side by side, from files of these names: a target that several have is numbered.

    Raises `DifferentProcessors` if two of them come from processors with different flags.
    """
    require_same_flags([(file, report.machine) for file, report in zip(files, reports, strict=True)])
    seen = Counter(server.name for report in reports for server in report.servers)
    figures: list[Figure] = []
    tables: dict[str, Table] = {}
    servers: list[Server] = []
    for place, report in enumerate(reports, 1):
        names = {s.name: s.name if seen[s.name] == 1 else f"{s.name} ({place})" for s in report.servers}
        servers += [replace(server, name=names[server.name]) for server in report.servers]
        figures += [replace(each, by={n: names.get(v, v) for n, v in each.by.items()}) for each in report.figures]
        for table in report.tables:
            rows: list[Row] = [
                {names.get(n, n): names.get(v, v) if isinstance(v, str) else v for n, v in row.items()}
                for row in table.rows
            ]
            before = tables.get(table.title)
            tables[table.title] = replace(table, rows=_joined(before.rows if before else (), rows))
    lead = [f"({at}) {file}: {' '.join(r.lead)}" for at, (file, r) in enumerate(zip(files, reports, strict=True), 1)]
    return replace(
        reports[0],
        title=f"{reports[0].title}: runs compared",
        lead=(*lead, *differences(reports)),
        figures=tuple(figures),
        tables=tuple(tables.values()),
        servers=tuple(servers),
        failures=tuple(failure for report in reports for failure in report.failures),
        command=(),
    )


def _joined(before: Sequence[Row], rows: Sequence[Row]) -> list[dict[str, Cell]]:
    """Rows of pivoted tables, which begin with what they are of, become one row; others follow each other."""
    found = [dict(row) for row in before]
    by_name = {row[""]: row for row in found if "" in row}
    for row in rows:
        if row.get("") in by_name:
            by_name[row[""]].update(row)
        else:
            found.append(dict(row))
    return found


def differences(reports: Sequence[Report]) -> Iterator[str]:
    """What keeps the runs from being comparable, a sentence for each."""
    for what, found in (
        ("inputs", {str(sorted(report.inputs.items())) for report in reports}),
        ("texts", {report.texts and report.texts.sha256 for report in reports}),
        ("plans", {str(report.plan) for report in reports}),
        ("machines", {str(report.machine) for report in reports}),
    ):
        if len(found) > 1:
            yield f"The runs had different {what}: not every difference between them is one of the servers."
