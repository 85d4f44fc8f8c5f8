"""The command line: `python -m loadgen COMMAND ...`."""

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from rich.console import Console

from loadgen import everything
from loadgen.commands import peers, report
from loadgen.errors import LoadgenError
from loadgen.experiments import mlperf
from loadgen.experiments.capacity import experiment as capacity
from loadgen.experiments.chaos import experiment as chaos
from loadgen.experiments.density import experiment as density
from loadgen.experiments.kv.experiment import KV
from loadgen.experiments.whitebox.experiment import WHITEBOX
from loadgen.options.common import EXIT_INTERRUPTED, EXIT_UNUSABLE, sigterm_as_interrupt
from loadgen.options.parser import OneLineParser
from loadgen.report.origin import published
from loadgen.selfcheck import command as selfcheck


class Command(Protocol):
    """A command: a module, or a `DjinnExperiment`."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""
        ...

    def run(self, options: argparse.Namespace, progress: Console) -> int:
        """Run the command; returns the exit code. Raises `LoadgenError`."""
        ...


COMMANDS: dict[str, tuple[Command, str]] = {
    "all": (everything, "every experiment but chaos, and one page that leads to their reports"),
    "density": (density, "agents that generate, think and come back"),
    "capacity": (capacity, "the most agents that a server holds within limits"),
    "whitebox": (WHITEBOX, "breakpoints between layers: what they change, and what they cost"),
    "kv": (KV, "what a session's KV is made of, and what it costs to keep, and to move to another server"),
    "chaos": (chaos, "a server or cluster under faults for long, beside a twin that checks every token"),
    "mlperf": (mlperf, "the conversations of one of MLPerf's traces of agents"),
    "report": (report, "results once more, one or several side by side"),
    "schema": (report.Schema(), "the form of a result file"),
    "selfcheck": (selfcheck, "whether the load generator itself tells the time right"),
    "peers": (peers, "install, start and stop the servers that Djinn is compared with"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns the exit code: 0 if all went well, 1 if something failed or missed its target, 2 if the run could not start,
    130 if it was interrupted, also by SIGTERM.
    """
    arguments = sys.argv[1:] if argv is None else argv
    options, unknown = make_parser().parse_known_args(arguments)
    if unknown:
        options.parser.refuse(unknown)
    parser: OneLineParser = options.parser
    del options.parser
    options.command, options.started_at = published(arguments), datetime.now(UTC)
    errors = Console(stderr=True, highlight=False)
    try:
        with sigterm_as_interrupt():
            code: int = options.run(options, errors)
    except LoadgenError as error:
        errors.print(f"loadgen: {parser.in_flags(str(error))}", markup=False, soft_wrap=True)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        errors.print("loadgen: interrupted")
        return EXIT_INTERRUPTED
    return code


def make_parser() -> argparse.ArgumentParser:
    """The options of every command."""
    parser = OneLineParser(prog="python -m loadgen", description="Measure servers from outside.")
    commands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for name, (command, text) in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_options(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser
