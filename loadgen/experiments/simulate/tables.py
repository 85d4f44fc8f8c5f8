"""The report as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from loadgen.experiments.simulate.measuring.validating import PERCENTILES
from loadgen.experiments.simulate.outcome import Outcome
from loadgen.experiments.simulate.report import SimulateReport
from loadgen.results.tables import TextTable
from loadgen.results.text import in_seconds, in_speed, milliseconds, share
from loadgen.results.verdicts import verdict_table
from loadgen.stats import Distribution


def tables(report: SimulateReport) -> Iterator[TextTable]:
    """The tables that have something in them."""
    every = (
        waits_table(report),
        work_table(report),
        directory_table(report),
        validation_table(report),
        verdict_table(report.verdicts),
        costs_table(report),
    )
    return (table for table in every if table.rows)


def waits_table(report: SimulateReport) -> TextTable:
    """How long turns wait."""
    rows = [
        (
            *_place(each),
            f"{each.sessions:,}",
            *(milliseconds(getattr(each.ttft_first_s, name, None)) for name in PERCENTILES),
            *(milliseconds(getattr(each.ttft_resumed_s, name, None)) for name in PERCENTILES),
            *(milliseconds(getattr(each.tpot_s, name, None)) for name in PERCENTILES),
            f"{each.duration_s:,.0f}",
            f"{each.took_s:,.1f}",
        )
        for each in report.outcomes
    ]
    header = (
        *("replicas", "policy", "rate", "sessions", "first turn p50", "p99", "resumed p50", "p99"),
        *("per token p50", "p99", "simulated s", "CPU s"),
    )
    note = "Milliseconds to the first token, and per further token. The rate is of agents, per second and replica."
    return TextTable("Simulated: waits", header, rows, note, text_columns=2)


def work_table(report: SimulateReport) -> TextTable:
    """What the cluster does twice, and for whom it is away."""
    rows = [
        (
            *_place(each),
            f"{each.recomputed_tokens:,}",
            share(each.recomputed_tokens, each.computed_tokens),
            f"{each.refused:,}",
            f"{each.interrupted:,}",
            f"{each.moves:,}",
            f"{each.away:,}",
            f"{each.dropped:,}",
        )
        for each in report.outcomes
    ]
    header = (
        *("replicas", "policy", "rate", "recomputed", "of prompts", "refused", "begun anew", "moves"),
        *("met a move", "dropped"),
    )
    note = "Recomputed: tokens of histories. Refused turns wait until their replica is back. Dropped: KV without room."
    return TextTable("Simulated: work", header, rows, note, text_columns=2)


def directory_table(report: SimulateReport) -> TextTable:
    """The load of the directory."""
    rows = [
        (
            *_place(each),
            *(
                f"{load.total:,} ({load.peak_per_s:,})"
                for load in (each.finds, each.puts, each.named_finds, each.named_puts)
            ),
            f"{each.redirects:,}",
        )
        for each in report.outcomes
    ]
    header = ("replicas", "policy", "rate", "look-ups", "writes", "named: look-ups", "writes", "sent on by the home")
    note = "In all, and in the busiest second. Named: what comes to it if all clients name their sessions themselves."
    return TextTable("Simulated: directory", header, rows, note, text_columns=2)


def validation_table(report: SimulateReport) -> TextTable:
    """Measured beside simulated."""
    rows = []
    for each in report.validations:
        name = "all" if each.seed is None else f"{each.seed}"
        for place, (figure, pair) in enumerate(each.pairs.items()):
            sides = (_percentiles(pair.measured), _percentiles(pair.simulated))
            errors = tuple(f"{pair.error(percentile):+.0%}" for percentile in PERCENTILES)
            others = "" if place or each.others_cpus is None else f"{each.others_cpus:.2f}"
            counted = f"{pair.measured.count:,}"
            rows.append(("" if place else name, figure, counted, *sides[0], *sides[1], *errors, others))
    header = (
        *("seed", "", "turns", "measured p50", "p99", "simulated p50", "p99"),
        *("error p50", "p99", "others"),
    )
    note = "Others: processors that were busy meanwhile with what was not measured."
    return TextTable("Measured and simulated, milliseconds", header, rows, note, text_columns=2)


def costs_table(report: SimulateReport) -> TextTable:
    """What was measured of the server."""
    costs = report.calibration.costs
    rates = {
        "KV, device to host": costs.out_bytes_per_s,
        "KV, host to device": costs.in_bytes_per_s,
        "KV, host to disk": costs.to_disk_bytes_per_s,
        "KV, disk to host": costs.from_disk_bytes_per_s,
    }
    rows = [
        *((f"a step of {count} sessions that decode", in_seconds(seconds)) for count, seconds in costs.decode_s),
        *((f"tokens of a step with {count}, mean of turns", f"{fmean(turns):.2f}") for count, turns in costs.decoded),
        *((f"a step with {tokens} prompt tokens", in_seconds(seconds)) for tokens, seconds in costs.prompt_s),
        ("turns' mean steps that decode, over their median", _range(costs.decode_ratios)),
        *(
            (f"a step with {tokens} prompt tokens, over its median", _range(each))
            for tokens, each in costs.prompt_ratios
        ),
        ("the rest of a turn's first token", in_seconds(costs.first_byte_s)),
        ("a first turn's more", in_seconds(costs.opening_s)),
        *((name, "not measured" if rate is None else in_speed(rate)) for name, rate in rates.items()),
        ("KV of a token", f"{costs.bytes_per_token:,} bytes"),
    ]
    return TextTable(f"Measured costs, with histories of {costs.context} tokens", ("", ""), rows)


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _place(each: Outcome) -> tuple[str, str, str]:
    return f"{each.replicas:,}", each.name, f"{each.rate:g}"


def _percentiles(found: Distribution) -> tuple[str, ...]:
    return tuple(milliseconds(getattr(found, name)) for name in PERCENTILES)
