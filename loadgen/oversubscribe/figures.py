"""The memory figure: demand rises past what the device holds, and the device's use stays where it is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from matplotlib.axes import Axes

from loadgen.oversubscribe.findings import Budget, MemorySample
from loadgen.oversubscribe.report import TargetReport
from loadgen.reporting.figures import Figure
from loadgen.reporting.plots import Series, level, lines
from loadgen.reporting.units import MIB

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
