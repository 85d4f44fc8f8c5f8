"""What was found, as tables."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.experiments.cluster.plan import Router
from loadgen.experiments.cluster.report import ClusterReport, SizeReport
from loadgen.experiments.cluster.summary import came_back, percent
from loadgen.results.failures import failure_table
from loadgen.results.tables import TextTable
from loadgen.results.text import NOT_TOLD, counts, duration, in_bytes, in_seconds, milliseconds
from loadgen.results.verdicts import MARKS
from loadgen.stats import Distribution
from loadgen.stats.distribution import percentile

SHOWN = 20
"""Wrong turns of each cluster: the others are in the result file."""


def tables(report: ClusterReport) -> Iterator[TextTable]:
    """The tables that have something in them, the targets first."""
    every = (
        _targets(report),
        _side_by_side(report),
        _wrong(report),
        _faults(report),
        *(_failures(size) for size in report.sizes),
    )
    return (table for table in every if table.rows)


def _targets(report: ClusterReport) -> TextTable:
    rows = [
        ("" if place else size.name, each.what, each.target, each.measured, each.outcome.value)
        for size in report.sizes
        for place, each in enumerate(size.verdicts)
    ]
    return TextTable("Targets", ("", "", "target", "measured", "outcome"), rows, text_columns=4, marks=MARKS)


def _side_by_side(report: ClusterReport) -> TextTable:
    columns = [figures(size) for size in report.sizes]
    rows = [(label, *(column[label] for column in columns)) for label in columns[0]] if columns else []
    note = "Waits are the clients', with all retries. Affinity is of the turns that reached a replica."
    return TextTable("By number of replicas", ("", *(size.name for size in report.sizes)), rows, note)


def figures(size: SizeReport) -> dict[str, str]:
    """Each figure of a cluster, by its name."""
    summary, findings = size.summary, size.findings
    routing, moves, retries = findings.routing, findings.moves, findings.retries
    moved_bytes, moving_s = sum(move.bytes for move in moves), sum(move.seconds for move in moves)
    affinity = None if routing is None else routing.affinity
    seconds, hashed = summary.duration_s, size.router is Router.HASH
    return {
        "a core for each replica": "yes" if size.pinned else "no",
        "turns completed": f"{summary.turns_completed:,} of {summary.turns_planned:,}",
        "duration": duration(seconds),
        "tokens/s": f"{summary.tokens_per_s:,.1f}",
        "TTFT, first, p50, ms": _shown(summary.ttft_first_s, "p50"),
        "TTFT, first, p99, ms": _shown(summary.ttft_first_s, "p99"),
        "TTFT, resumed, p50, ms": _shown(summary.ttft_resumed_s, "p50"),
        "TTFT, resumed, p99, ms": _shown(summary.ttft_resumed_s, "p99"),
        "the same, of turns that never failed, p50, ms": _shown(_calm(size), "p50"),
        "the same, of turns that never failed, p99, ms": _shown(_calm(size), "p99"),
        "affinity": NOT_TOLD if affinity is None else percent(affinity),
        "turns at a replica without all of the history": f"{findings.cold:,}" if hashed else NOT_TOLD,
        "turns followed after a 421": NOT_TOLD if routing is None else f"{routing.followed:,}",
        "turns refused: owner away": NOT_TOLD if routing is None else f"{routing.away:,}",
        "turns refused: moving on": NOT_TOLD if routing is None else f"{routing.moving_on:,}",
        "turns whose owner went away": NOT_TOLD if routing is None else f"{routing.lost:,}",
        "sessions moved": f"{len(moves):,}",
        "moves/s": f"{len(moves) / seconds:.2f}" if seconds else "",
        "moved": in_bytes(moved_bytes),
        "a move, mean": in_seconds(moving_s / len(moves)) if moves else "",
        "moves refused": counts(findings.refused),
        "replicas killed": f"{came_back(findings, 'kill')}",
        "tokens recomputed": NOT_TOLD if summary.recomputed_tokens is None else f"{summary.recomputed_tokens:,}",
        "finished turns lost": f"{len(findings.lost):,}",
        "turns that failed before they were done": f"{len(retries.turns):,}",
        "done, but the answer was lost": f"{retries.recovered:,}",
        "retried errors": counts(retries.errors),
        "turns that failed for good": counts(summary.turn_errors),
    }


def _calm(size: SizeReport) -> Distribution | None:
    """Seconds to the first token of resumed turns without a retry."""
    again = set(size.findings.retries.turns)
    turns = (turn for turn in size.run.turns if turn.turn > 0 and (turn.agent, turn.turn) not in again)
    return Distribution.of(turn.ttft_s for turn in turns)


def _shown(found: Distribution | None, name: str) -> str:
    return "" if found is None else percentile(name, milliseconds(getattr(found, name)), found.count)


def _wrong(report: ClusterReport) -> TextTable:
    rows = [
        (size.name, f"{one.agent}", "" if one.turn is None else f"{one.turn}", one.what)
        for size in report.sizes
        for one in (*size.findings.wrong, *size.findings.lost)[:SHOWN]
    ]
    return TextTable("Wrong and lost turns", ("", "agent", "turn", "what"), rows, text_columns=4)


def _faults(report: ClusterReport) -> TextTable:
    rows = [
        (
            "" if place else size.name,
            f"{fault.began_s:,.1f}",
            fault.kind,
            fault.replica,
            "did not come back" if fault.ended_s is None else f"{fault.ended_s - fault.began_s:.1f}",
        )
        for size in report.sizes
        for place, fault in enumerate(size.findings.faults)
    ]
    header = ("", "second", "what", "replica", "seconds until it was back")
    return TextTable("What was done to replicas", header, rows, text_columns=4)


def _failures(size: SizeReport) -> TextTable:
    found = failure_table(size.findings.failures, interrupted=size.findings.interrupted)
    return TextTable(f"{found.title}: {size.name}", found.header, found.rows, text_columns=found.text_columns)
