"""What an experiment found, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from loadgen.report import Report, TargetReport
from loadgen.stats import Distribution, Summary

LATENCIES = {
    "TTFT, first turn": "ttft_first_s",
    "TTFT, resumed turns": "ttft_resumed_s",
    "turn latency": "turn_latency_s",
    "inter-token latency": "inter_token_s",
    "signal round trip": "signal_s",
    "lateness of sending": "lateness_s",
}


def render(report: Report) -> Group:
    """The figures of every target side by side."""
    return Group(_latency_table(report.targets), _total_table(report.targets))


def _latency_table(targets: Sequence[TargetReport]) -> Table:
    table = Table(title="milliseconds", title_justify="left")
    for heading in ("", "target"):
        table.add_column(heading)
    for heading in ("samples", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right")
    for label, field in LATENCIES.items():
        for target in targets:
            distribution: Distribution | None = getattr(target.summary, field)
            table.add_row(label, target.spec.name, *_cells(distribution))
        table.add_section()
    return table


def _cells(distribution: Distribution | None) -> list[str]:
    if distribution is None:
        return ["0", "", "", "", ""]
    values = (distribution.p50, distribution.p90, distribution.p99, distribution.max)
    return [str(distribution.count), *(f"{1000 * value:,.1f}" for value in values)]


def _total_table(targets: Sequence[TargetReport]) -> Table:
    table = Table(title="totals", title_justify="left")
    table.add_column("")
    for target in targets:
        table.add_column(target.spec.name, justify="right")
    columns = [_totals(target.summary) for target in targets]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    return table


def _totals(summary: Summary) -> dict[str, str]:
    return {
        "turns completed": f"{summary.turns_completed} of {summary.turns_planned}",
        "turns failed": str(summary.turns_failed),
        "turns not run": f"{summary.turns_not_run}{' (interrupted)' if summary.interrupted else ''}",
        "errors of turns": _counts(summary.turn_errors),
        "errors of signals and closing": _counts(summary.other_errors),
        "tokens/s": f"{summary.tokens_per_s:,.1f}",
        "seconds": f"{summary.duration_s:,.1f}",
        "agents at once": str(summary.peak_agents),
        "prompt tokens cached": _share(summary.cached_tokens, summary.prompt_tokens),
        "prompt tokens recomputed": _share(summary.recomputed_tokens, summary.prompt_tokens),
    }


def _counts(errors: dict[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in errors.items()) or "none"


def _share(tokens: int | None, of: int) -> str:
    if tokens is None:
        return "not told"
    return f"{tokens / of:.0%}" if of else "0%"
