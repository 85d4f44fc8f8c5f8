"""The report as a page, with its curves."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from loadgen.experiments.capacity.report import CapacityReport, Probe
from loadgen.experiments.capacity.tables import server_table, tables
from loadgen.load.describing import agent_in_words, arrivals_in_words
from loadgen.results.figures import Figure
from loadgen.results.page import Page, Section
from loadgen.results.plots import Series, level, lines
from loadgen.stats import Distribution

CAPTION = (
    "Over the number of agents, the median of several rounds; the dashed line is the limit. A probe that could only "
    "fail ended early: its point is of the turns until then."
)


def figures(report: CapacityReport) -> Iterator[Figure]:
    """The curves that have something in them: a line for each target, and the limit."""
    plan = report.plan
    every: tuple[tuple[str, float, Callable[[Probe], Distribution | None]], ...] = (
        ("p95 of resumed first tokens", plan.slo_ttft_s, lambda probe: probe.summary.ttft_resumed_s),
        ("p95 of time per token", plan.slo_tpot_s, lambda probe: probe.summary.tpot_s),
    )
    for title, limit, figure in every:
        series = curves(report, figure)
        if series:
            yield Figure(title, CAPTION, partial(_draw, series=series, limit=limit))


def curves(report: CapacityReport, figure: Callable[[Probe], Distribution | None]) -> list[Series]:
    """p95 of a figure, in seconds, over agents, of each target that has any, in the colour of the target."""
    found = []
    for number, target in enumerate(report.targets):
        rounds: defaultdict[int, list[float]] = defaultdict(list)
        for probe in target.findings.probes:
            distribution = figure(probe)
            if distribution is not None:
                rounds[probe.agents].append(distribution.p95)
        points = [(float(agents), median(values)) for agents, values in sorted(rounds.items())]
        if points:
            found.append(Series(target.server.name, points, number))
    return found


def _draw(axes: Axes, series: list[Series], limit: float) -> None:
    lines(axes, series, "agents", "seconds", markers=True)
    level(axes, limit, "limit")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def make_page(report: CapacityReport) -> Page:
    """All that there is to see of a run."""
    plan = report.plan
    lead = (
        f"{plan.least:,} to {plan.most:,} agents, {agent_in_words(plan.load)} All arrive within "
        f"{report.arrive_within_s:.3g} s on average ({arrivals_in_words(plan.load)}), so that they are there together.",
        f"Each number of agents is probed once{_border(plan.rounds)}. Real text ({report.texts.name}).",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}; seed {report.seed}.",
    )
    first, *rest = tables(report)
    sections = (
        Section("", tables=(first,)),
        Section("Curves", figures=tuple(figures(report))),
        Section("Tables", tables=tuple(rest)),
        Section("Servers", tables=(server_table(report.targets),)),
    )
    return Page("Capacity: agents that a server holds within limits", lead, sections, report.command)


def _border(rounds: int) -> str:
    return "" if rounds == 1 else f", and at the border until the majority of {rounds} rounds is certain"
