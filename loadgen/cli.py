"""The command line: `python -m loadgen EXPERIMENT ...`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from loadgen.commands import density, whitebox
from loadgen.commands.common import EXIT_INTERRUPTED, EXIT_UNUSABLE
from loadgen.errors import LoadgenError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one experiment.

    Returns the exit code: 0 if all went well, 1 if something failed or missed its target, 2 if the run could not start,
    130 if it was interrupted.
    """
    options = _parser().parse_args(argv)
    errors = Console(stderr=True, highlight=False)
    try:
        code: int = options.run(options, errors)
    except LoadgenError as error:
        errors.print(f"loadgen: {error}", markup=False, soft_wrap=True)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        errors.print("loadgen: interrupted before the first turn was sent")
        return EXIT_INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadgen", description="Measure servers from outside.")
    experiments = parser.add_subparsers(dest="experiment", required=True)
    for name, command, text in (
        ("density", density, "agents that generate, think and come back"),
        ("whitebox", whitebox, "breakpoints between layers: what they change, and what they cost"),
    ):
        experiment = experiments.add_parser(name, help=text)
        command.add_options(experiment)
        experiment.set_defaults(run=command.run)
    return parser
