"""`python -m loadgen selfcheck`."""

import argparse
import asyncio
from collections.abc import Sequence

from rich.console import Console

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.load.records import Run
from loadgen.options.common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from loadgen.report.tables import Table, to_rich
from loadgen.selfcheck.checking import Check, Delays, check, plan_load, serving
from loadgen.stats import Distribution

PERCENTILES = ("p50", "p99")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The load and what may be off."""
    for flag, kind, default, text in (
        ("--agents", int, 200, "agents at once"),
        ("--tokens", int, 120, "tokens of each turn"),
        ("--ttft", float, 0.2, "seconds until the stub's first token"),
        ("--gap", float, 0.2, "seconds from one of its tokens to the next"),
        ("--tolerance", float, 0.002, "seconds that a figure may be off"),
    ):
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default:g})")


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it and print the figures; returns the exit code. Raises `LoadgenError`."""
    for name in ("tokens", "ttft", "gap", "tolerance"):
        if not getattr(options, name) > 0:
            raise LoadgenError(f"{name} must be above 0")
    delays = Delays(options.ttft, options.gap)
    workload = plan_load(delays, options.agents, options.tokens)
    progress.print(f"{options.agents} agents on a stub, two turns each", highlight=False)
    try:
        with serving(delays) as url:
            seen, checks = asyncio.run(check(url, delays, workload))
    except DjinnError as error:
        raise LoadgenError(f"the stub failed: {error}") from error
    if seen.interrupted:
        return EXIT_INTERRUPTED
    output = Console(highlight=False)
    output.print(to_rich([_table(seen, checks)]))
    exact = all(abs(one.error_s(name)) <= options.tolerance for one in checks for name in PERCENTILES)
    output.print(f"{'within' if exact else 'NOT within'} {1000 * options.tolerance:g} ms", markup=False)
    return EXIT_OK if exact and not seen.failures else EXIT_FAILED


def _table(seen: Run, checks: Sequence[Check]) -> Table:
    rows = [
        {
            "": one.name,
            "set": _milliseconds(one.set_s),
            **{f"stub {name}": _milliseconds(getattr(one.kept, name)) for name in PERCENTILES},
            **{f"seen {name}": _milliseconds(getattr(one.seen, name)) for name in PERCENTILES},
            **{f"off {name}": _milliseconds(one.error_s(name)) for name in PERCENTILES},
        }
        for one in checks
    ]
    late = Distribution.of(turn.sent_s - turn.due_s for turn in seen.turns)
    events = sum(len(turn.token_times_s) for turn in seen.turns)
    note = (
        f"{len(seen.turns)} turns, {len(seen.failures)} failures, {events / seen.duration_s:,.0f} events a second; "
        f"lateness of sending p99 {_milliseconds(None if late is None else late.p99)} ms."
    )
    return Table("milliseconds: as set, as the stub kept it, as the load generator saw it", rows, note)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f}"
