"""The report as a page: what was found on each target, with its plots."""

from collections.abc import Iterator

from loadgen.experiments.whitebox.findings import Waited
from loadgen.experiments.whitebox.report import TargetReport, WhiteboxReport
from loadgen.experiments.whitebox.tables import tables
from loadgen.results.figures import Figure
from loadgen.results.page import Page, Section
from loadgen.results.plots import Series, cdf, lines

PLOTTED = (Waited.RESUME, Waited.TOKEN)


def make_page(report: WhiteboxReport) -> Page:
    """All that there is to see of a run."""
    plan = report.plan
    lead = (
        f"{plan.sequences} sequences of {plan.context} + {plan.tokens} tokens, greedy; steering by {plan.scale:g}; "
        f"{plan.others} others during a pause of {plan.pause_seconds:g} s, {plan.repeats} times.",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}.",
    )
    return Page("The white-box experiment", lead, tuple(_section(target) for target in report.targets), report.command)


def _section(target: TargetReport) -> Section:
    server = target.server
    figures = (*_throughput(target), *_round_trips(target))
    return Section(f"{server.name}: {server.url}", server.started, figures, tuple(tables(target)))


def _throughput(target: TargetReport) -> Iterator[Figure]:
    names = {True: "one session paused", False: "none paused"}
    series = [
        Series(names[window.paused], points, int(window.paused))
        for window in target.findings.windows
        if (points := [(second + 0.5, float(count)) for second, count in enumerate(window.tokens)])
    ]
    if series:
        yield Figure(
            f"Throughput of the others, second by second: {target.server.name}",
            "A line for each repeat. Lines that lie on each other: who is paused costs the others nothing.",
            lambda axes: lines(axes, series, "seconds", "tokens/s"),
        )


def _round_trips(target: TargetReport) -> Iterator[Figure]:
    """From the fastest to the 99th percentile: a single straggler would squeeze all others into a corner."""
    trips = [trip for trip in target.findings.round_trips if trip.positions == 1]
    samples = {
        waited.value: _without_stragglers([1000 * trip.seconds for trip in trips if trip.waited is waited])
        for waited in PLOTTED
    }
    if any(samples.values()):
        yield Figure(
            f"A token with a pause in its pass, and one without: {target.server.name}",
            "Share of tokens that took no longer, seen by the client; the slowest hundredth is left out.",
            lambda axes: cdf(axes, samples, "milliseconds"),
        )


def _without_stragglers(values: list[float]) -> list[float]:
    return sorted(values)[: max(1, len(values) * 99 // 100)]
