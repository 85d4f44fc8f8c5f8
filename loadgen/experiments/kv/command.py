"""`python -m loadgen kv`."""

import argparse
from dataclasses import replace
from functools import partial

from rich.console import Console

from loadgen.experiments.kv.experiment import run_kv
from loadgen.experiments.kv.links import NOMINAL_LINKS, Link
from loadgen.experiments.kv.page import make_page, tables
from loadgen.experiments.kv.plan import KVPlan
from loadgen.options.common import add_common, each_target, finish, make_output, read_corpus, with_origin
from loadgen.options.disk import with_disk
from loadgen.options.plan_fields import add_plan_options, read_plan
from loadgen.options.targets import add_targets, read_targets, run_on
from loadgen.results.page import write_outputs

FULL = KVPlan()
QUICK = KVPlan(tokens=512, repeats=3, decoded=32)
OPTIONS = {
    "tokens": "of each measured session",
    "repeats": "how often each measurement is taken",
    "decoded": "tokens generated to see what fp8 changes",
    "seed": "of texts",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, and the fields of `KVPlan`."""
    add_targets(parser)
    add_common(parser)
    add_plan_options(parser, FULL, QUICK, OPTIONS)
    names = ", ".join(f"{link.name}={link.bytes_per_s / 1e9:g}" for link in NOMINAL_LINKS)
    parser.add_argument(
        "--link",
        action="append",
        metavar="NAME=GB/s",
        help=f"a link to calculate with, instead of these: {names}; repeat for more",
    )


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan, corpus, targets, folder = _plan(options), read_corpus(options), read_targets(options), make_output(options)
    with with_disk(targets) as ready:
        report = run_on(ready, lambda specs: run_kv(specs, plan, corpus, progress))
    report = with_origin(report, options)
    shown = each_target(report.targets, tables)
    return finish(report, shown, partial(write_outputs, report, make_page(report), folder))


def _plan(options: argparse.Namespace) -> KVPlan:
    links = NOMINAL_LINKS if options.link is None else tuple(Link.parse(text) for text in options.link)
    return replace(read_plan(options, FULL, QUICK), links=links)
