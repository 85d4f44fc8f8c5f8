"""`python -m loadgen migrate`."""

import argparse
from functools import partial

from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.experiments.migrate.experiment import run_migrate
from loadgen.experiments.migrate.page import make_page, tables
from loadgen.experiments.migrate.plan import MigratePlan
from loadgen.options.common import add_common, finish, make_output, read_corpus, with_origin
from loadgen.options.disk import with_disk
from loadgen.options.plan_fields import add_plan_options, integers, read_plan, with_default
from loadgen.options.targets import add_targets, read_targets, run_on
from loadgen.results.page import write_outputs
from loadgen.results.tables import to_rich

FULL = MigratePlan()
QUICK = MigratePlan(lengths=(128, 512), repeats=2, decoded=32)
OPTIONS = {
    "repeats": "sessions of each length",
    "new_tokens": "tokens of text that are added after the move",
    "decoded": "tokens that are then generated and compared",
    "seed": "of texts",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The two targets, and the fields of `MigratePlan`."""
    add_targets(parser)
    add_common(parser)
    lengths = with_default("tokens of the sessions that move", FULL, QUICK, "lengths")
    parser.add_argument("--lengths", type=integers, metavar="N,N,...", help=lengths)
    add_plan_options(parser, FULL, QUICK, OPTIONS)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan, corpus = read_plan(options, FULL, QUICK), read_corpus(options)
    targets, folder = read_targets(options), make_output(options)
    if len(targets) != 2:
        raise LoadgenError(f"migrate takes two targets, from the first to the second, not {len(targets)}")
    with with_disk(targets) as ready:
        report = run_on(ready, lambda specs: run_migrate(specs[0], specs[1], plan, corpus, progress))
    report = with_origin(report, options)
    return finish(report, to_rich(tables(report)), partial(write_outputs, report, make_page(report), folder))
