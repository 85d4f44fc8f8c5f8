"""`python -m loadgen whitebox`."""

import argparse
from dataclasses import fields
from functools import partial

from rich.console import Console

from loadgen.experiments.whitebox.experiment import run_whitebox
from loadgen.experiments.whitebox.page import make_page
from loadgen.experiments.whitebox.plan import WhiteboxPlan
from loadgen.experiments.whitebox.tables import tables
from loadgen.options.common import add_common, each_target, finish, make_output, read_corpus, with_origin
from loadgen.options.plan_fields import integers
from loadgen.options.targets import add_targets, read_targets, run_on
from loadgen.results.page import write_outputs

DEFAULTS = WhiteboxPlan()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, and the fields of `WhiteboxPlan` with its defaults."""
    add_targets(parser)
    add_common(parser)
    parser.add_argument(
        "--layers",
        type=integers,
        default=DEFAULTS.layers,
        metavar="N,N,...",
        help="where to pause and to steer (default: a quarter, half and three quarters of the way up)",
    )
    for name, kind, text in (
        ("sequences", int, "prompts for each layer"),
        ("tokens", int, "tokens generated for each prompt"),
        ("context", int, "tokens of each prompt"),
        ("scale", float, "what steering multiplies by"),
        ("others", int, "sessions that decode next to a paused one"),
        ("pause_seconds", float, "how long they are watched"),
        ("repeats", int, "how often, with and without the paused session"),
        ("seed", int, "of texts"),
    ):
        default = getattr(DEFAULTS, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default:g})")


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan = WhiteboxPlan(**{field.name: getattr(options, field.name) for field in fields(WhiteboxPlan)})
    corpus, targets, folder = read_corpus(options), read_targets(options), make_output(options)
    report = run_on(targets, lambda specs: run_whitebox(specs, plan, corpus, progress))
    report = with_origin(report, options)
    shown = each_target(report.targets, tables)
    return finish(report, shown, partial(write_outputs, report, make_page(report), folder))
