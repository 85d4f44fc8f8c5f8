"""`python -m loadgen kv`."""

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
from loadgen.commands.disk import with_disk
from loadgen.commands.targets import add_targets, read_targets, run_on
from loadgen.experiments.kv import run_kv
from loadgen.kv.links import NOMINAL_LINKS, Link
from loadgen.kv.page import make_page, tables
from loadgen.kv.plan import KVPlan
from loadgen.reporting.outputs import write_outputs
from loadgen.reporting.tables import to_rich

DEFAULTS = KVPlan()
QUICK = KVPlan(tokens=512, repeats=3, decoded=32)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, and the fields of `KVPlan`."""
    add_targets(parser)
    add_common(parser)
    for name, text in (
        ("tokens", "of each measured session"),
        ("repeats", "how often each measurement is taken"),
        ("decoded", "tokens generated to see what fp8 changes"),
        ("seed", "of texts"),
    ):
        full, quick = getattr(DEFAULTS, name), getattr(QUICK, name)
        shown = f"{full}" if full == quick else f"{full}, with --quick {quick}"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} (default: {shown})")
    names = ", ".join(f"{link.name}={link.bytes_per_s / 1e9:g}" for link in NOMINAL_LINKS)
    parser.add_argument(
        "--link",
        action="append",
        metavar="NAME=GB/s",
        help=f"a link to calculate with, instead of these: {names}; repeat for more",
    )
    parser.add_argument("--quick", action="store_true", help="measure less, in about a minute")


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan, corpus, targets, folder = _plan(options), read_corpus(options), read_targets(options), make_output(options)
    with with_disk(targets) as ready:
        report = run_on(ready, lambda specs: run_kv(specs, plan, corpus, progress))
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


def _plan(options: argparse.Namespace) -> KVPlan:
    """The defaults, or those of --quick, with what was given."""
    given = {
        name: value
        for name in ("tokens", "repeats", "decoded", "seed")
        if (value := getattr(options, name)) is not None
    }
    links = NOMINAL_LINKS if options.link is None else tuple(Link.parse(text) for text in options.link)
    return replace(QUICK if options.quick else DEFAULTS, **given, links=links)
