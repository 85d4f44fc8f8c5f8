"""The report as a page."""

from __future__ import annotations

from loadgen.oversubscribe.figures import figures
from loadgen.oversubscribe.report import OversubscribeReport, TargetReport
from loadgen.oversubscribe.tables import tables
from loadgen.reporting.page import Page, Section


def make_page(report: OversubscribeReport) -> Page:
    """All that there is to see of a run."""
    plan = report.plan
    lead = (
        f"{plan.sessions:,} sessions that grow to {plan.context:,} tokens each in {plan.turns} turns of {plan.tokens} "
        f"generated tokens, {plan.concurrency} turns at once; real text ({report.texts.name}). After each turn a "
        "session signals `io_wait`, and comes back unannounced.",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}.",
    )
    sections = tuple(_section(target) for target in report.targets)
    return Page("More sessions than the device holds", lead, sections, report.command)


def _section(target: TargetReport) -> Section:
    server = target.server
    figures_and_tables = tuple(figures(target)), tuple(tables(target))
    return Section(f"{server.name}: {server.url}", server.started, *figures_and_tables)
