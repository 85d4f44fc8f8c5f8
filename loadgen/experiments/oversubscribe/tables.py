"""The figures as tables of text, for the terminal and for the page."""

from collections.abc import Iterator

from loadgen.experiments.oversubscribe.report import TargetReport, mib
from loadgen.results.tables import TextTable
from loadgen.results.verdicts import verdict_table
from loadgen.stats.distribution import percentile


def tables(target: TargetReport) -> Iterator[TextTable]:
    """The tables that have something in them, the targets met and missed first."""
    every = (verdict_table(target.verdicts), _failures(target), _memory(target), _turns(target), _checks(target))
    return (table for table in every if table.rows)


def _failures(target: TargetReport) -> TextTable:
    """Every part that failed, and for each kind of failed turns how many and the first message."""
    findings = target.findings
    rows = [(failure.part, failure.kind, failure.message) for failure in findings.failures]
    for kind, count in target.summary.errors.items():
        first = next(failure for failure in findings.turn_failures if failure.kind == kind)
        rows.append((f"{count} {'turn' if count == 1 else 'turns'}", kind, first.message))
    if findings.interrupted:
        rows.append(("the run", "interrupted", "what follows is what was measured until then"))
    return TextTable("Failures", ("part", "error", "message"), rows, text_columns=3)


def _memory(target: TargetReport) -> TextTable:
    summary, budget = target.summary, target.findings.budget
    if budget is None:
        return TextTable("KV", (), ())
    plateau = summary.plateau
    flat = "" if plateau is None else f"{mib(plateau.low)} to {mib(plateau.high)}"
    rows = [
        ("all histories (demand)", "", mib(summary.demand_bytes), ""),
        ("device", mib(budget.device_bytes), mib(summary.device_bytes), flat),
        ("host", mib(budget.host_bytes), mib(summary.host_bytes), ""),
        ("disk", mib(budget.disk_bytes), mib(summary.disk_bytes), ""),
    ]
    note = f"{len(target.findings.samples)} samples. KV policy: {budget.policy}."
    return TextTable("KV", ("", "budget", "highest", "while demand exceeds the device"), rows, note)


def _turns(target: TargetReport) -> TextTable:
    summary = target.summary
    seconds = summary.turn_s
    rows = [
        ("completed", f"{summary.turns_completed} of {summary.turns_planned}"),
        ("failed", str(summary.turns_failed)),
        ("not run", str(summary.turns_not_run)),
        ("seconds of the run", f"{summary.duration_s:,.1f}"),
        ("tokens generated", f"{summary.completion_tokens:,}"),
        ("tokens of contexts", f"{summary.prompt_tokens:,}"),
        ("of them with KV already", f"{summary.cached_tokens:,}"),
        ("of them recomputed", f"{summary.recomputed_tokens:,}"),
    ]
    if seconds is not None:
        shown = [percentile(name, f"{getattr(seconds, name):.2f}", seconds.count) for name in ("p50", "p99")]
        rows.append(("seconds of a turn, p50 / p99", " / ".join(shown)))
    return TextTable("Turns", ("", ""), rows)


def _checks(target: TargetReport) -> TextTable:
    rows = [
        (f"session {check.session}", str(len(check.crowded)), str(len(check.alone)), str(check.matching))
        for check in target.findings.checks
    ]
    note = "Greedy, the same texts in the same turns. All KV of the session that is alone is computed from scratch."
    header = ("", "tokens in the crowd", "tokens alone", "the same")
    return TextTable("Sessions answered once more, alone", header, rows, note)
