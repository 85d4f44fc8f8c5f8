"""The report as a page and for the terminal."""

from collections.abc import Callable, Iterator
from functools import partial

from matplotlib.axes import Axes

from loadgen.experiments.soak.findings import Fault, Sample
from loadgen.experiments.soak.report import SoakReport
from loadgen.results.failures import failure_table
from loadgen.results.figures import INK, Figure
from loadgen.results.page import Page, Section
from loadgen.results.plots import Series, lines
from loadgen.results.tables import TextTable
from loadgen.results.text import MIB, counts
from loadgen.results.verdicts import verdict_table

SHOWN = 40
"""Characters of an answer."""

PLOTS: dict[str, tuple[str, Callable[[Sample], float | None]]] = {
    "Resident memory": ("MiB", lambda sample: sample.rss_bytes / MIB),
    "Open descriptors": ("descriptors", lambda sample: sample.descriptors),
    "State folder": ("MiB", lambda sample: sample.state_bytes / MIB),
    "Open sessions": ("sessions", lambda sample: sample.sessions),
}


def make_page(report: SoakReport) -> Page:
    """All that there is to see of a run."""
    plan = report.plan
    lead = (
        f"{plan.agents} agents take turns for {plan.minutes:g} minutes, greedily. They pause at breakpoints, fork, "
        f"move through files and rewind. About every {plan.every:g} s a fault comes to the server. A second server, "
        "which is spared, takes the same turns: its tokens are the right ones.",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}.",
    )
    figures = tuple(_figures(report)) if report.findings.samples else ()
    sections = (
        Section("Server", report.server.started),
        Section("Findings", tables=tuple(tables(report))),
        Section("Over time", figures=figures),
    )
    return Page("A server under faults", lead, sections, report.command)


def tables(report: SoakReport) -> Iterator[TextTable]:
    """The tables that have something in them, the targets first."""
    findings = report.findings
    every = (
        verdict_table(report.verdicts),
        failure_table(findings.failures, interrupted=findings.interrupted),
        _unexpected(report),
        _wrong(report),
        _faults(report),
        _done(report),
    )
    return (table for table in every if table.rows)


def _unexpected(report: SoakReport) -> TextTable:
    rows = [
        (
            f"{one.at_s:,.1f}",
            one.agent,
            one.action,
            " ".join(f"{part}" for part in (one.kind, one.status, one.code) if part is not None),
            one.message,
            one.request_id or "",
        )
        for one in report.findings.unexpected
    ]
    header = ("second", "agent", "action", "error", "message", "request")
    return TextTable("Errors that no fault explains", header, rows, text_columns=len(header))


def _wrong(report: SoakReport) -> TextTable:
    rows = [
        (
            f"{one.at_s:,.1f}",
            one.agent,
            "" if one.position is None else f"{one.position}",
            f"{one.made}"[:SHOWN],
            f"{one.expected}"[:SHOWN],
        )
        for one in report.findings.wrong
    ]
    header = ("second", "agent", "position", "answer", "the twin's")
    return TextTable("Wrong answers", header, rows, text_columns=len(header))


def _faults(report: SoakReport) -> TextTable:
    rows = [
        (f"{one.began_s:,.1f}", one.name, f"{one.ended_s - one.began_s:.1f}", one.detail)
        for one in report.findings.faults
    ]
    rows += [("", name, "", f"not made: {why}") for name, why in report.findings.skipped.items()]
    return TextTable("Faults", ("second", "fault", "seconds", "what came of it"), rows, text_columns=4)


def _done(report: SoakReport) -> TextTable:
    summary, findings = report.summary, report.findings
    rows = [
        ("actions", counts(findings.actions)),
        ("tokens compared", f"{summary.tokens:,}"),
        ("errors while a fault lasted", counts(findings.expected)),
        ("longest fault, until the server was ready", f"{summary.away_s:.1f} s"),
    ]
    return TextTable("What agents did", ("", ""), rows, text_columns=2)


def _figures(report: SoakReport) -> Iterator[Figure]:
    for title, (unit, of) in PLOTS.items():
        points = [(sample.at_s, value) for sample in report.findings.samples if (value := of(sample)) is not None]
        caption = "Of all processes of the server; thin lines are faults."
        yield Figure(
            title, caption, partial(_draw, name=title, points=points, unit=unit, faults=report.findings.faults)
        )


def _draw(axes: Axes, name: str, points: list[tuple[float, float]], unit: str, faults: list[Fault]) -> None:
    lines(axes, [Series(name, points)], "seconds", unit)
    for fault in faults:
        axes.axvline(fault.began_s, color=INK, linewidth=0.5, alpha=0.3)
