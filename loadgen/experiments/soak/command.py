"""`python -m loadgen soak`."""

import argparse
import asyncio
from dataclasses import fields
from functools import partial

from rich.console import Console

from loadgen.experiments.soak.experiment import run_soak
from loadgen.experiments.soak.page import make_page, tables
from loadgen.experiments.soak.plan import SoakPlan
from loadgen.options.common import add_output, finish, make_output, with_origin
from loadgen.options.models import whole_model
from loadgen.processes.folders import default_model
from loadgen.results.page import write_outputs
from loadgen.results.tables import to_rich

DEFAULT = SoakPlan()
OPTIONS = {
    "minutes": "how long agents run",
    "agents": "agents at once",
    "context": "tokens of a session, before another is opened",
    "tokens": "tokens generated in each turn, greedily",
    "every": "seconds between two faults, about",
    "seed": "of prompts, actions and faults",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, and the fields of `SoakPlan`."""
    add_output(parser)
    parser.add_argument(
        "--model", metavar="MODEL", help=f"what `djinn serve --model` takes (default: {default_model()})"
    )
    for name, text in OPTIONS.items():
        usual = getattr(DEFAULT, name)
        parser.add_argument(
            f"--{name}", type=type(usual), default=usual, metavar="N", help=f"{text} (default: {usual:g})"
        )


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan = SoakPlan(**{field.name: getattr(options, field.name) for field in fields(SoakPlan)})
    folder = make_output(options)
    report = with_origin(asyncio.run(run_soak(plan, whole_model(options.model or default_model()), progress)), options)
    return finish(report, to_rich(tables(report)), partial(write_outputs, report, make_page(report), folder))
