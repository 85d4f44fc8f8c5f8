"""`python -m loadgen density`."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import fields

from rich.console import Console

from loadgen.commands.common import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    add_common,
    make_output,
    read_corpus,
    read_specs,
)
from loadgen.experiments.density import run_density
from loadgen.report import write_json
from loadgen.tables import render
from loadgen.workload import Signals, Workload

DEFAULTS = Workload()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, and the fields of `Workload` with its defaults."""
    add_common(
        parser,
        target="NAME=URL[#MODEL]",
        target_help="with #MODEL an OpenAI-compatible server, without it Djinn; repeat to compare",
    )
    for name, kind, text in (
        ("agents", int, "how many agents arrive"),
        ("rate", float, "arrivals per second, a Poisson process; inf: all at once"),
        ("context", int, "tokens of the first prompt"),
        ("turns", int, "turns of each agent"),
        ("system_tokens", int, "tokens at the start of the first prompt that all agents share"),
        ("resume_tokens", int, "tokens of new text in each later turn"),
        ("completion_tokens", int, "tokens generated in each turn"),
        ("seed", int, "of arrivals, think times and texts"),
        ("time_scale", float, "factor on arrival and think times; 0.1 is ten times as fast"),
    ):
        default = getattr(DEFAULTS, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")
    low, high = DEFAULTS.think
    parser.add_argument(
        "--think",
        type=_think,
        default=DEFAULTS.think,
        metavar="LOW:HIGH",
        help=f"seconds between turns, drawn evenly (default: {low:g}:{high:g})",
    )
    parser.add_argument(
        "--signals",
        type=Signals,
        choices=list(Signals),
        default=DEFAULTS.signals,
        help=f"what Djinn is told of think times (default: {DEFAULTS.signals})",
    )


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    workload = Workload(**{field.name: getattr(options, field.name) for field in fields(Workload)})
    corpus, specs, folder = read_corpus(options), read_specs(options), make_output(options)
    report = asyncio.run(run_density(specs, workload, corpus, progress))
    output = Console(highlight=False)
    output.print(render(report))
    output.print(f"results: {write_json(report, folder)}", markup=False, soft_wrap=True)
    if any(target.run.interrupted for target in report.targets):
        return EXIT_INTERRUPTED
    succeeded = all(target.summary.succeeded for target in report.targets)
    return EXIT_OK if succeeded else EXIT_FAILED


def _think(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be LOW:HIGH in seconds, not {text!r}") from None
