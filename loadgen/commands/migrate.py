"""`python -m loadgen migrate`."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

from rich.console import Console

from loadgen.commands.common import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    add_common,
    make_output,
    read_corpus,
)
from loadgen.commands.disk import with_disk
from loadgen.commands.targets import add_targets, read_targets, run_on
from loadgen.errors import LoadgenError
from loadgen.experiments.migrate import run_migrate
from loadgen.migrate.page import make_page, tables
from loadgen.migrate.plan import MigratePlan
from loadgen.reporting.outputs import write_outputs
from loadgen.reporting.tables import to_rich

DEFAULTS = MigratePlan()
QUICK = MigratePlan(lengths=(128, 512), repeats=2, decoded=32)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The two targets, and the fields of `MigratePlan`."""
    add_targets(parser)
    add_common(parser)
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N,...",
        help=f"tokens of the sessions that move (default: {_shown(DEFAULTS)}, with --quick {_shown(QUICK)})",
    )
    for name, text in (
        ("repeats", "sessions of each length"),
        ("new_tokens", "tokens of text that are added after the move"),
        ("decoded", "tokens that are then generated and compared"),
        ("seed", "of texts"),
    ):
        full, quick = getattr(DEFAULTS, name), getattr(QUICK, name)
        shown = f"{full}" if full == quick else f"{full}, with --quick {quick}"
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, metavar="N", help=f"{text} (default: {shown})")
    parser.add_argument("--quick", action="store_true", help="measure less, in about a minute")


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan, corpus, targets, folder = _plan(options), read_corpus(options), read_targets(options), make_output(options)
    if len(targets) != 2:
        raise LoadgenError(f"migrate takes two targets, from the first to the second, not {len(targets)}")
    with with_disk(targets) as ready:
        report = run_on(ready, lambda specs: run_migrate(specs[0], specs[1], plan, corpus, progress))
    report = replace(report, command=options.command)
    output = Console(highlight=False)
    output.print(to_rich(tables(report)))
    for path in write_outputs(report, make_page(report), folder):
        output.print(f"results: {path}", markup=False, soft_wrap=True)
    if report.findings.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if report.succeeded else EXIT_FAILED


def _plan(options: argparse.Namespace) -> MigratePlan:
    """The defaults, or those of --quick, with what was given."""
    names = [field.name for field in fields(MigratePlan)]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replace(QUICK if options.quick else DEFAULTS, **given)


def _shown(plan: MigratePlan) -> str:
    return ",".join(map(str, plan.lengths))


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(length) for length in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, not {text!r}") from None
