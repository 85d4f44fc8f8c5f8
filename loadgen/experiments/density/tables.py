"""What an experiment found, as tables."""

from collections import Counter
from collections.abc import Iterator, Sequence

from loadgen.experiments.density.headlines import headline_table, spread_table
from loadgen.experiments.density.report import Named, names
from loadgen.results.tables import TextTable
from loadgen.results.text import DIRECTIONS, NOT_TOLD, counts, duration, mebibytes, milliseconds, share
from loadgen.stats import Distribution, Summary
from loadgen.stats.distribution import FEWEST_SAMPLES

LATENCIES = {
    "TTFT, first turn": "ttft_first_s",
    "TTFT, resumed turns": "ttft_resumed_s",
    "wake-up": "wake_up_s",
    "queue": "queue_s",
    "restore": "restore_s",
    "prefill": "prefill_s",
    "time per output token": "tpot_s",
    "inter-token latency": "inter_token_s",
    "turn latency": "turn_latency_s",
    "signal round trip": "signal_s",
    "lateness of sending": "lateness_s",
}


def tables(targets: Sequence[Named]) -> Iterator[TextTable]:
    """The tables that have something in them, the most important first."""
    yield headline_table(targets)
    every = (
        latency_table(targets),
        total_table(targets),
        swap_table(targets),
        spread_table(targets),
        failure_table(targets),
    )
    yield from (table for table in every if table is not None and table.rows)


def latency_table(targets: Sequence[Named]) -> TextTable:
    """Percentiles of every kind of waiting; targets that do not tell one are left out of it."""
    rows: list[tuple[str, ...]] = []
    for label, field in LATENCIES.items():
        found: list[tuple[str, Distribution | None]] = [(t.name, getattr(t.report.summary, field)) for t in targets]
        told = [(name, distribution) for name, distribution in found if distribution is not None]
        rows += [("" if place else label, name, *_percentiles(one)) for place, (name, one) in enumerate(told)]
    header = ("", "target", "samples", "p50", "p90", "p95", "p99", "max")
    note = (
        "Wake-up, which is queue and restore together, and prefill are of resumed turns, where the server tells them."
    )
    return TextTable("Milliseconds", header, rows, note, text_columns=2)


def _percentiles(found: Distribution) -> tuple[str, ...]:
    shown = (
        milliseconds(getattr(found, name)) if found.count >= fewest else "too few"
        for name, fewest in FEWEST_SAMPLES.items()
    )
    return f"{found.count:,}", *shown, milliseconds(found.max)


def total_table(targets: Sequence[Named]) -> TextTable:
    """Sums over whole runs, a column for each target."""
    columns = [_totals(target.report.summary) for target in targets]
    rows = [(label, *(column[label] for column in columns)) for label in columns[0]]
    return TextTable("Totals", ("", *names(targets)), rows)


def _totals(summary: Summary) -> dict[str, str]:
    good, cpu = summary.goodput, summary.cpu_s
    return {
        "turns completed": f"{summary.turns_completed:,} of {summary.turns_planned:,}",
        "turns failed": f"{summary.turns_failed:,}",
        "turns not run": f"{summary.turns_not_run:,}{' (interrupted)' if summary.interrupted else ''}",
        "errors of turns": counts(summary.turn_errors),
        "errors of signals and closing": counts(summary.other_errors),
        "duration": duration(summary.duration_s),
        "turns/s": f"{summary.turns_per_s:,.2f}",
        "tokens/s": f"{summary.tokens_per_s:,.1f}",
        "goodput, turns/s": "-" if good is None else f"{good.turns_per_s:,.2f} ({good.share:.0%} of turns)",
        "agents at once": f"{summary.peak_agents:,}",
        "prompt tokens cached": share(summary.cached_tokens, summary.prompt_tokens),
        "tokens recomputed": NOT_TOLD if summary.recomputed_tokens is None else f"{summary.recomputed_tokens:,}",
        "most KV on the device, MiB": mebibytes(summary.peak_device_bytes),
        "server's events": NOT_TOLD if summary.server_counts is None else counts(summary.server_counts),
        "server's CPU seconds": NOT_TOLD if cpu is None else f"{cpu:,.1f}",
        "server's peak memory, MiB": mebibytes(summary.peak_rss_bytes),
    }


def swap_table(targets: Sequence[Named]) -> TextTable:
    """KV that moved, by direction; what did not happen at all is left out."""
    rows = []
    for target in targets:
        moved = [(way, swap) for way, swap in (target.report.summary.swaps or {}).items() if swap.count]
        for place, (way, swap) in enumerate(moved):
            speed = "" if swap.bytes_per_s is None else f"{swap.bytes_per_s / 1e9:,.2f}"
            amounts = (f"{swap.count:,}", mebibytes(swap.bytes), f"{swap.seconds:,.2f}", speed)
            rows.append(("" if place else target.name, DIRECTIONS.get(way, way), *amounts))
    return TextTable("KV moved", ("", "direction", "times", "MiB", "seconds", "GB/s"), rows, text_columns=2)


def failure_table(targets: Sequence[Named]) -> TextTable:
    """What went wrong, by kind, with the first message of each."""
    rows = []
    for target in targets:
        failures = [failure for run in target.report.runs for failure in run.failures]
        first = {failure.kind: failure.message for failure in reversed(failures)}
        kinds = Counter(failure.kind for failure in failures).most_common()
        rows += [
            ("" if place else target.name, kind, first[kind], f"{number:,}")
            for place, (kind, number) in enumerate(kinds)
        ]
    return TextTable("What failed", ("", "error", "first message", "times"), rows, text_columns=3)


def server_table(targets: Sequence[Named]) -> TextTable:
    """How each server was reached, and started where that is known."""
    rows = [
        (target.name, server.url, server.model or "Djinn's own protocol", server.started or NOT_TOLD)
        for target in targets
        for server in (target.report.server,)
    ]
    return TextTable("", ("", "URL", "model", "started with"), rows, text_columns=4)
