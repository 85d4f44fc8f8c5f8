"""The figures as tables of text, for the terminal and for the page."""

from collections.abc import Iterator

from client import MemoryMap
from loadgen.experiments.whitebox.findings import Arm
from loadgen.experiments.whitebox.report import TargetReport
from loadgen.experiments.whitebox.summary import Ratio, ServerLatency
from loadgen.results.failures import failure_table
from loadgen.results.tables import TextTable
from loadgen.results.verdicts import verdict_table
from loadgen.stats import Distribution
from loadgen.stats.distribution import percentile

ARMS = (Arm.UNMATCHED, Arm.STEERED)


def tables(target: TargetReport) -> Iterator[TextTable]:
    """The tables that have something in them, the targets met and missed first."""
    every = (
        verdict_table(target.verdicts),
        failure_table(target.findings.failures, interrupted=target.findings.interrupted),
        _accuracy(target),
        _latency(target),
        _server(target),
        _divergence(target),
        _rates(target),
        _windows(target),
        _memory(target),
    )
    return (table for table in every if table.rows)


def _accuracy(target: TargetReport) -> TextTable:
    rows = [
        (
            f"layer {row.layer}",
            str(row.trials),
            f"{row.matching} of {row.tokens}",
            f"{row.share:.2%}",
            str(row.prefill_pauses),
            str(row.decode_pauses),
        )
        for row in target.summary.accuracy
    ]
    header = ("pause after", "sequences", "same tokens", "accuracy", "pauses in prompts", "pauses in decoding")
    return TextTable("Token accuracy with a pause in every pass", header, rows)


def _latency(target: TargetReport) -> TextTable:
    rows = [
        (row.what, f"{row.positions:.0f}", str(row.seconds.count), *_percentiles(row.seconds))
        for row in target.summary.latency
    ]
    return TextTable("Latency, milliseconds", ("", "positions", "samples", "p50", "p90", "p99"), rows)


def _server(target: TargetReport) -> TextTable:
    rows = [(name, str(found.count), *_percentiles(found)) for name, found in target.summary.server.items()]
    return TextTable("The server's own clock, milliseconds", ("", "samples", "p50", "p90", "p99"), rows)


def _percentiles(found: Distribution | ServerLatency) -> list[str]:
    return [percentile(name, _ms(getattr(found, name))[0], found.count) for name in ("p50", "p90", "p99")]


def _divergence(target: TargetReport) -> TextTable:
    rows = [
        (
            f"layer {row.layer}",
            str(row.turns),
            f"{row.differing / row.turns:.0%}",
            "" if row.first is None else f"{row.first.p50:.0f}",
        )
        for row in target.summary.divergence
    ]
    header = ("steered after", "sequences", "that say something else", "from token (median)")
    return TextTable("Steering", header, rows)


def _rates(target: TargetReport) -> TextTable:
    rows = [
        (arm.value, f"{ratio.median:.2%}", f"{ratio.low:.2%}", f"{ratio.high:.2%}", str(ratio.pairs))
        for arm in ARMS
        if (ratio := target.summary.kept[arm]) is not None
    ]
    return TextTable("Decode rate, of that without breakpoints", ("", "median", "from", "to", "pairs"), rows)


def _windows(target: TargetReport) -> TextTable:
    rows = [
        (
            f"{window.repeat + 1}, {'with' if window.paused else 'without'} a paused session",
            f"{window.tokens_per_s:,.1f}",
        )
        for window in target.findings.windows
    ]
    kept: Ratio | None = target.summary.kept_by_others
    if kept is not None:
        rows.append(("with over without, median", f"{kept.median:.2%}"))
    return TextTable("Throughput of the others", ("repeat", "tokens/s"), rows)


def _memory(target: TargetReport) -> TextTable:
    rows = [(when, *_held(memory)) for when, memory in target.findings.memory.items()]
    header = ("", "sessions", "checkpoints", "KV on device", "KV on host", "KV on disk", "KV kept for reuse")
    return TextTable("Memory, MiB but for sessions", header, rows)


def _held(memory: MemoryMap) -> tuple[str, ...]:
    tiers = (memory.data.device, memory.data.host, memory.data.disk)
    sizes = (
        memory.stack.checkpoint_bytes,
        *(tier.owned_bytes for tier in tiers),
        sum(tier.cached_bytes for tier in tiers),
    )
    return str(memory.sessions), *(f"{size / 2**20:,.3f}" for size in sizes)


def _ms(*seconds: float) -> tuple[str, ...]:
    return tuple(f"{1000 * value:,.3f}" for value in seconds)
