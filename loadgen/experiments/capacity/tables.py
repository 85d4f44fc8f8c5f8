"""What the search found, as tables."""

from collections.abc import Callable, Iterator, Sequence

from loadgen.experiments.capacity.report import CapacityReport, Probe, TargetReport
from loadgen.experiments.capacity.wording import held_in_words, why
from loadgen.results.failures import failure_table
from loadgen.results.tables import Mark, TextTable
from loadgen.results.text import NOT_TOLD, counts, duration, milliseconds
from loadgen.stats import Distribution

HELD, FAILED, EARLY = "held", "failed", "failed early"
MARKS = {HELD: Mark.GOOD, FAILED: Mark.BAD, EARLY: Mark.BAD}

PROBE_NOTE = (
    "In order of time; p50 / p95 in milliseconds. A probe that can only fail ends early: its figures are of the turns "
    "until then. Of fewer than 20 turns, p95 is nearly the greatest."
)


def tables(report: CapacityReport) -> Iterator[TextTable]:
    """The tables that have something in them, the most important first."""
    yield held_table(report)
    yield probe_table(report.targets)
    yield course_table(report.targets)
    for target in report.targets:
        table = failure_table(target.findings.failures, interrupted=target.findings.interrupted)
        if table.rows:
            yield TextTable(f"{table.title}: {target.server.name}", table.header, table.rows, text_columns=3)


def held_table(report: CapacityReport) -> TextTable:
    """For each target the number of agents that it holds, the first that failed, and why."""
    plan = report.plan
    note = (
        f"p95 of resumed first tokens at most {plan.slo_ttft_s:g} s, p95 of time per token at most "
        f"{plan.slo_tpot_s:g} s, no errors. Searched from {plan.least:,} to {plan.most:,} agents."
    )
    rows = [
        (target.server.name, held_in_words(target), *_first_failed(target.findings.probes, target.findings.failed))
        for target in report.targets
    ]
    return TextTable("Agents held", ("target", "agents held", "first that failed", "why"), rows, note, 4)


def _first_failed(probes: Sequence[Probe], agents: int | None) -> tuple[str, str]:
    """The number, and why its last probe that failed did."""
    if agents is None:
        return "", ""
    last = next(probe for probe in reversed(probes) if probe.agents == agents and not probe.held)
    return f"{agents:,}", why(last)


def probe_table(targets: Sequence[TargetReport]) -> TextTable:
    """Every probe: its figures, and whether the number of agents is held."""
    header = ("target", "agents", "verdict", "resumed first token", "time per token", "tokens/s")
    return TextTable("Probes", header, list(_rows(targets, _figures)), PROBE_NOTE, marks=MARKS)


def course_table(targets: Sequence[TargetReport]) -> TextTable:
    """Every probe: what ran, and what failed."""
    header = ("target", "agents", "turns", "errors", "at once", "duration")
    return TextTable("What ran in each probe", header, list(_rows(targets, _course)))


def _rows(targets: Sequence[TargetReport], cells: Callable[[Probe], tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for target in targets:
        for place, probe in enumerate(target.findings.probes):
            yield "" if place else target.server.name, f"{probe.agents:,}", *cells(probe)


def _figures(probe: Probe) -> tuple[str, ...]:
    summary = probe.summary
    verdict = HELD if probe.held else EARLY if probe.ended_early else FAILED
    return verdict, _percentiles(summary.ttft_resumed_s), _percentiles(summary.tpot_s), f"{summary.tokens_per_s:,.1f}"


def _percentiles(found: Distribution | None) -> str:
    return "" if found is None else f"{milliseconds(found.p50)} / {milliseconds(found.p95)}"


def _course(probe: Probe) -> tuple[str, ...]:
    summary = probe.summary
    return (
        f"{summary.turns_completed:,} of {summary.turns_planned:,}",
        counts({**summary.turn_errors, **summary.other_errors}),
        f"{summary.peak_agents:,}",
        duration(summary.duration_s),
    )


def server_table(targets: Sequence[TargetReport]) -> TextTable:
    """How each server was reached, and started where that is known."""
    rows = [
        (server.name, server.url, server.model or "Djinn's own protocol", server.started or NOT_TOLD)
        for server in (target.server for target in targets)
    ]
    return TextTable("", ("", "URL", "model", "started with"), rows, text_columns=4)
