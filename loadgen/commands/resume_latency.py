"""`python -m loadgen resume-latency`."""

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
from loadgen.experiments.resume_latency import run_resume_latency
from loadgen.peers.options import read_settings
from loadgen.reporting.outputs import write_outputs
from loadgen.reporting.tables import to_rich
from loadgen.resume.away import SPARE_TOKENS
from loadgen.resume.page import make_page
from loadgen.resume.plan import QUICK, ResumePlan
from loadgen.resume.tables import tables

FULL = ResumePlan()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, and the fields of `ResumePlan`."""
    add_targets(parser, kv=None)
    add_common(parser)
    parser.add_argument("--lengths", type=_integers, metavar="N,N,...", help=_help("tokens of the sessions", "lengths"))
    parser.add_argument(
        "--depths", type=_numbers, metavar="%,%,...", help=_help("where to pause, in %% of the layers", "depths")
    )
    parser.add_argument("--repeats", type=int, metavar="N", help=_help("samples of each way and place", "repeats"))
    parser.add_argument("--seed", type=int, metavar="N", help=_help("of texts", "seed"))
    parser.add_argument("--quick", action="store_true", help="measure less, in about a minute")


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan = _plan(options)
    options.kv = options.kv or max(plan.lengths) + SPARE_TOKENS
    targets, corpus, folder = read_targets(options), read_corpus(options), make_output(options)
    # What a server runs that somebody else started is only known if it was said.
    knows_model = options.model is not None or any(target.running is None for target in targets)
    model = read_settings(options).model if knows_model else None
    report = run_on(targets, lambda specs: run_resume_latency(specs, plan, model, corpus, progress))
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


def _plan(options: argparse.Namespace) -> ResumePlan:
    """The defaults, or those of --quick, with what was given."""
    names = ("lengths", "depths", "repeats", "seed")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replace(QUICK if options.quick else FULL, **given)


def _help(text: str, name: str) -> str:
    full, quick = (_shown(getattr(plan, name)) for plan in (FULL, QUICK))
    return f"{text} (default: {full if full == quick else f'{full}, with --quick {quick}'})"


def _shown(value: int | tuple[float, ...]) -> str:
    return f"{value}" if isinstance(value, int) else ",".join(f"{each:g}" for each in value)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between them, not {text!r}") from None


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, not {text!r}") from None
