"""The report as a page, with its figures."""

from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes

from loadgen.experiments.oversubscribe.findings import Budget, MemorySample
from loadgen.experiments.oversubscribe.report import OversubscribeReport, TargetReport
from loadgen.experiments.oversubscribe.tables import tables
from loadgen.results.figures import Figure
from loadgen.results.page import Page, Section
from loadgen.results.plots import Series, level, lines
from loadgen.results.text import MIB

NAMES = {
    "demand_bytes": "all histories",
    "device_bytes": "on the device",
    "host_bytes": "on the host",
    "disk_bytes": "on disk",
}


def figures(target: TargetReport) -> Iterator[Figure]:
    """KV over time, and turns over time."""
    findings, name = target.findings, target.server.name
    if findings.samples and findings.budget is not None:
        yield Figure(
            f"KV over time: {name}",
            "What the histories of all sessions come to, and where KV is. On the device is all that is in use there, "
            "also what is kept because it may be used again. A session that is back on the device keeps its copy on "
            "the host.",
            partial(_draw_memory, samples=findings.samples, budget=findings.budget),
        )
    ends = sorted(turn.sent_s + turn.seconds for turn in findings.turns)
    if ends:
        planned = target.summary.turns_planned
        yield Figure(
            f"Turns completed: {name}",
            "Where the rise flattens, turns wait for KV, or are longer because their histories are.",
            partial(_draw_turns, ends=ends, planned=planned),
        )


def _draw_memory(axes: Axes, samples: list[MemorySample], budget: Budget) -> None:
    series = [
        Series(label, [(one.at_s, getattr(one, field) / MIB) for one in samples], number)
        for number, (field, label) in enumerate(NAMES.items())
    ]
    lines(axes, [one for one in series if any(y for _, y in one.points)], "seconds", "MiB of KV")
    level(axes, budget.device_bytes / MIB, "device's room")
    axes.set_ylim(bottom=0)


def _draw_turns(axes: Axes, ends: list[float], planned: int) -> None:
    points = [(0.0, 0.0), *((end, float(count)) for count, end in enumerate(ends, start=1))]
    lines(axes, [Series("completed", points)], "seconds", "turns", steps=True)
    level(axes, planned, "planned")


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
