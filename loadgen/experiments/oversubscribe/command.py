"""`python -m loadgen oversubscribe`."""

import argparse
from functools import partial

from rich.console import Console

from loadgen.experiments.oversubscribe.experiment import run_oversubscribe
from loadgen.experiments.oversubscribe.page import make_page
from loadgen.experiments.oversubscribe.plan import QUICK, OversubscribePlan
from loadgen.experiments.oversubscribe.tables import tables
from loadgen.options.common import add_common, each_target, finish, make_output, read_corpus, with_origin
from loadgen.options.plan_fields import add_plan_options, read_plan
from loadgen.options.targets import add_targets, read_targets, run_on
from loadgen.results.page import write_outputs

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
DTYPE = "float32"
"""In which a session says the same beside others as alone: with the roundings of 16 bits, close calls go either way."""
SHARE = 4
"""A server that is started for the run holds one in so many of the tokens on its device."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, and the fields of `OversubscribePlan`."""
    add_targets(parser, kv=None, dtype=DTYPE)
    add_common(parser)
    add_plan_options(parser, FULL, QUICK, OPTIONS)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan = read_plan(options, FULL, QUICK)
    targets = read_targets(options, kv_tokens=max(plan.sessions // SHARE, 2) * plan.context)
    corpus, folder = read_corpus(options), make_output(options)
    report = run_on(targets, lambda specs: run_oversubscribe(specs, plan, corpus, progress))
    report = with_origin(report, options)
    shown = each_target(report.targets, tables)
    return finish(report, shown, partial(write_outputs, report, make_page(report), folder))
