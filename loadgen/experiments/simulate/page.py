"""The report as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes

from loadgen.experiments.simulate.measuring.validating import FIGURES, PERCENTILES
from loadgen.experiments.simulate.outcome import Outcome
from loadgen.experiments.simulate.plan import Event
from loadgen.experiments.simulate.report import SimulateReport
from loadgen.experiments.simulate.tables import (
    costs_table,
    directory_table,
    validation_table,
    waits_table,
    work_table,
)
from loadgen.load.describing import load_in_words
from loadgen.results.figures import INK, Figure
from loadgen.results.page import Page, Section
from loadgen.results.plots import Series, bars, lines
from loadgen.results.verdicts import verdict_table

ASSUMED = (
    "Assumed, and measured nowhere: replicas that do not disturb each other; links between them; a front door that is "
    "never busy; clients that hear at once of a replica that is gone; hashing and queues that know at once who is up. "
    "A kill loses all KV but that on disk."
)

SHORT = dict(zip(FIGURES, ("first", "resumed", "token"), strict=True))


def make_page(report: SimulateReport) -> Page:
    """All that there is to see of a run."""
    plan, on = report.plan, report.calibrated_on
    events = ", ".join(map(str, plan.events)) or "none"
    room = (
        f"{plan.device_tokens:,} tokens of KV on the device, {plan.host_tokens:,} on the host and "
        f"{plan.disk_tokens:,} on disk"
    )
    lead = (
        "Simulated: every cluster and every policy below. Measured: the costs of one server, and in the validation the "
        "waits of real turns.",
        f"For each replica: {load_in_words(report.workload)}",
        f"Each has room for {room}. KV moves between replicas at {plan.link_bytes_per_s / 1e9:g} GB/s.",
        f"Events: {events}. A replica is back after {plan.down_s:g} s.",
        ASSUMED,
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}. Costs are of {report.server.name} on {on}.",
    )
    simulated = tuple(
        table for table in (waits_table(report), work_table(report), directory_table(report)) if table.rows
    )
    compared = tuple(table for table in (validation_table(report), verdict_table(report.verdicts)) if table.rows)
    sections = (
        Section("Simulated", figures=tuple(_simulated(report)), tables=simulated),
        Section("Measured and simulated", figures=tuple(_compared(report)), tables=compared),
        Section("Measured costs", report.server.started, (_costs(report),), (costs_table(report),)),
    )
    shown = tuple(section for section in sections if any(table.rows for table in section.tables))
    return Page("A simulated cluster", lead, shown, report.command)


def _simulated(report: SimulateReport) -> Iterator[Figure]:
    sizes = dict.fromkeys((each.replicas, each.rate) for each in report.outcomes)
    rates = {size: [rate for other, rate in sizes if other == size] for size, _ in sizes}
    for size, rate in sizes:
        chosen = [each for each in report.outcomes if (each.replicas, each.rate) == (size, rate)]
        which = f"{size:,} replicas" + (f", {rate:g}/s" if len(rates[size]) > 1 else "")
        yield Figure(
            f"Resumed turns, p99: {which}",
            "Simulated: seconds to the first token, by the time at which turns were sent. Vertical lines are events.",
            partial(_draw_moments, outcomes=chosen, events=report.plan.events),
        )
        yield Figure(
            f"Prompt tokens computed: {which}",
            "Simulated. Histories that are recomputed are work that a policy makes.",
            partial(_draw_work, outcomes=chosen),
        )
    for size, tried in rates.items():
        if len(tried) > 1:
            chosen = [each for each in report.outcomes if each.replicas == size]
            yield Figure(
                f"Resumed turns against load: {size:,} replicas",
                "Simulated: p99 of the first token. The rate is of agents that arrive, per second and replica.",
                partial(_draw_rates, outcomes=chosen),
            )


def _draw_moments(axes: Axes, outcomes: Sequence[Outcome], events: Sequence[Event]) -> None:
    series = [Series(each.name, [(moment.at_s, moment.p99) for moment in each.moments]) for each in outcomes]
    lines(axes, series, "seconds", "seconds to the first token", log_y=True)
    for event in events:
        axes.axvline(event.at_s, color=INK, linewidth=0.8, alpha=0.5)


def _draw_work(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    again = [each.recomputed_tokens / 1e6 for each in outcomes]
    new = [(each.computed_tokens - each.recomputed_tokens) / 1e6 for each in outcomes]
    names = [each.name for each in outcomes]
    bars(axes, names, {"new tokens": new, "histories again": again}, "million tokens", stacked=True)


def _draw_rates(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    policies = dict.fromkeys(each.policy for each in outcomes)
    series = [
        Series(policy, [(o.rate, o.ttft_resumed_s.p99) for o in outcomes if o.policy is policy and o.ttft_resumed_s])
        for policy in policies
    ]
    lines(axes, series, "agents a second and replica", "seconds to the first token", log_y=True, markers=True)


def _compared(report: SimulateReport) -> Iterator[Figure]:
    for each in report.validations:
        if each.seed is None:
            groups = [f"{SHORT[figure]} {percentile}" for figure in each.pairs for percentile in PERCENTILES]
            columns = [(pair, name) for pair in each.pairs.values() for name in PERCENTILES]
            sides = {
                side: [1000 * getattr(getattr(pair, side), name) for pair, name in columns]
                for side in ("measured", "simulated")
            }
            yield Figure(
                "The same turns, measured and simulated",
                f"First tokens of first and resumed turns, and time per token; {each.turns:,} turns of all seeds.",
                partial(_draw_compared, groups=groups, sides=sides),
            )


def _draw_compared(axes: Axes, groups: Sequence[str], sides: dict[str, list[float]]) -> None:
    bars(axes, groups, sides, "milliseconds")


def _costs(report: SimulateReport) -> Figure:
    costs = report.calibration.costs
    series = [
        Series("sessions that decode", [(float(at), 1000 * seconds) for at, seconds in costs.decode_s]),
        Series("prompt tokens", [(float(at), 1000 * seconds) for at, seconds in costs.prompt_s]),
    ]
    return Figure(
        "Time of a step",
        "Measured through HTTP; the simulation takes lines between the points.",
        lambda axes: lines(axes, series, "tokens in a step", "milliseconds", log_x=True, log_y=True, markers=True),
    )
