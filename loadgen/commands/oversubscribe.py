"""`python -m loadgen oversubscribe`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from rich.console import Console

from loadgen.commands.common import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    add_common,
    make_output,
    read_corpus,
)
from loadgen.commands.targets import add_targets, read_targets, run_on
from loadgen.experiments.oversubscribe import run_oversubscribe
from loadgen.oversubscribe.page import make_page
from loadgen.oversubscribe.plan import QUICK, OversubscribePlan
from loadgen.oversubscribe.tables import tables
from loadgen.reporting.outputs import write_outputs
from loadgen.reporting.tables import to_rich

FULL = OversubscribePlan()
OPTIONS = {
    "sessions": "sessions that grow",
    "context": "tokens of each at its end",
    "turns": "turns of each",
    "tokens": "tokens generated in each turn, greedily",
    "concurrency": "turns at once",
    "checked": "sessions that are answered once more, alone",
    "seed": "of texts",
}
SHARE = 4
"""A server that is started for the run holds one in so many of the tokens on its device."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, and the fields of `OversubscribePlan`."""
    add_targets(parser, kv=None)
    add_common(parser)
    for name, text in OPTIONS.items():
        full, quick = getattr(FULL, name), getattr(QUICK, name)
        shown = f"{full}" if full == quick else f"{full}, with --quick {quick}"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} (default: {shown})")
    parser.add_argument("--quick", action="store_true", help="measure less, in well under a minute")


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan = _plan(options)
    options.kv = options.kv or max(plan.sessions // SHARE, 2) * plan.context
    targets, corpus, folder = read_targets(options), read_corpus(options), make_output(options)
    report = run_on(targets, lambda specs: run_oversubscribe(specs, plan, corpus, progress))
    report = replace(report, command=options.command)
    output = Console(highlight=False)
    for target in report.targets:
        output.print(f"{target.server.name}: {target.server.url}", markup=False)
        output.print(to_rich(tables(target)))
    for path in write_outputs(report, make_page(report), folder):
        output.print(f"results: {path}", markup=False, soft_wrap=True)
    if any(target.findings.interrupted for target in report.targets):
        return EXIT_INTERRUPTED
    return EXIT_OK if all(target.succeeded for target in report.targets) else EXIT_FAILED


def _plan(options: argparse.Namespace) -> OversubscribePlan:
    """The defaults, or those of --quick, with what was given."""
    given = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    return replace(QUICK if options.quick else FULL, **given)
