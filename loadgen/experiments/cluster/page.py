"""The report as a page."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.axes import Axes

from loadgen.experiments.cluster.plan import ClusterPlan
from loadgen.experiments.cluster.report import ClusterReport
from loadgen.experiments.cluster.tables import tables
from loadgen.experiments.density.curves import completed
from loadgen.load.describing import load_in_words
from loadgen.results.figures import INK, Figure
from loadgen.results.page import Page, Section
from loadgen.results.plots import Series, bars, cdf, lines


def make_page(report: ClusterReport) -> Page:
    """All that there is to see of a run."""
    pinned = [f"{size.replicas}" for size in report.sizes if size.pinned]
    cores = f"{report.machine.cpus} cores; " + (
        f"each replica had its own core where there were {' or '.join(pinned)}."
        if pinned
        else "no replica had its own."
    )
    lead = (
        load_in_words(report.workload),
        f"The same agents on clusters of several sizes. {plan_in_words(report.plan)} "
        "A single server has answered the same prompts: its tokens are the right ones.",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}; {cores}",
    )
    servers = "\n".join(size.server.started for size in report.sizes)
    sections = (
        Section("Findings", tables=tuple(tables(report))),
        Section("Figures", figures=tuple(_figures(report))),
        Section("Clusters", servers),
    )
    return Page("A cluster as one server", lead, sections, report.command)


def plan_in_words(plan: ClusterPlan) -> str:
    """What is done to a cluster, in sentences."""
    words = [f"An operator moves {plan.moves_per_second:g} sessions a second."] if plan.moves_per_second else []
    if plan.kill_every is not None:
        most = f", {plan.kills} times" if plan.kills else ""
        words.append(f"Every {plan.kill_every:g} s a replica is killed{most}.")
    if plan.standby:
        words.append("Another process waits to take the place of each replica.")
    if plan.drain_at is not None:
        words.append(f"After {plan.drain_at:g} s one is told to end.")
    return " ".join(words) or "Nothing is done to them."


def _figures(report: ClusterReport) -> Iterator[Figure]:
    sizes = [size for size in report.sizes if size.run.turns]
    if not sizes:
        return
    waits = {size.name: [turn.ttft_s for turn in size.run.turns if turn.turn > 0] for size in sizes}
    if any(waits.values()):
        yield Figure(
            "Time to first token, resumed turns",
            "Share of the resumed turns whose first token had come by then, with all retries.",
            lambda axes: cdf(axes, waits, "seconds", log=True),
        )
    rates = {"tokens/s": [size.summary.tokens_per_s for size in sizes]}
    yield Figure(
        "Throughput",
        "Tokens of completed turns over the whole run, thinking included.",
        lambda axes: bars(axes, [size.name for size in sizes], rates, "tokens/s"),
    )

    def draw(axes: Axes) -> None:
        lines(axes, [Series(size.name, completed(size.run)) for size in sizes], "seconds", "turns", steps=True)
        for size in sizes:
            for fault in size.findings.faults:
                axes.axvline(fault.began_s, color=INK, linewidth=0.5, alpha=0.3)

    yield Figure("Turns completed", "Over time; thin lines are replicas that were killed or told to end.", draw)
