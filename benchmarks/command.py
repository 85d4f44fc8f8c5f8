"""A benchmark as a command: read the options, measure, show the figures, keep them."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from benchmarks.measuring import DISTURBED_SHARE
from benchmarks.record import RESULTS, Run, write_run
from loadgen.errors import LoadgenError
from loadgen.options.common import EXIT_FAILED, EXIT_OK, EXIT_UNUSABLE, sigterm_as_interrupt
from loadgen.processes.launch import default_model
from loadgen.report.tables import Figure, figure_table, to_markdown, to_rich


def make_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that already knows --model, --cores, --quick and --output."""
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("--model", type=Path, default=default_model().expanduser(), help="a Transformers folder")
    parser.add_argument("--cores", type=int, choices=range(1, 257), default=2, metavar="1..256", help="default 2")
    parser.add_argument("--quick", action="store_true", help="a short run to see that all works; writes no file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for results")
    return parser


def exit_status(model: Path, benchmark: Callable[[], None]) -> int:
    """Runs the benchmark of `model` if it is there; what goes wrong with the model or a server is a message."""
    if not (model / "tokenizer.json").exists():
        print(f"no model in {model}: `djinn models export smollm2-135m-instruct` first", file=sys.stderr)
        return EXIT_UNUSABLE
    try:
        with sigterm_as_interrupt():
            benchmark()
    except LoadgenError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def bind_to_cores(count: int) -> list[int]:
    """Binds this process, and every process that it starts from now on, to its first `count` cores; returns them."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return cores


class HasShare(Protocol):
    """What was measured. `other_cpu_share`: of the cores, what processes outside the benchmark had."""

    @property
    def other_cpu_share(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun(Run):
    """A run of a benchmark of Djinn alone. `settings`: what the server or the engine was given."""

    plan: object
    settings: object
    figures: list[Figure]
    measured: HasShare


def finish(arguments: argparse.Namespace, name: str, title: str, run: OwnRun, note: str) -> None:
    """Show the figures, and keep what was measured in full: `NAME-FLAGS-CORES-DATE.json` and `.md`. `note` describes
    the plan and what spreads mean.
    """
    console, table, others = Console(), figure_table(title, run.figures), run.measured.other_cpu_share
    console.print(f"on {run.place_and_time}", highlight=False)
    console.print(to_rich([table]))
    if others > DISTURBED_SHARE:
        console.print(f"disturbed: other processes had {others:.0%} of the cores")
    if not arguments.quick:
        heading = f"# {title}: {run.model} on {run.place_and_time}"
        told = f"Processes outside the benchmark had at most {others:.1%} of the cores."
        text = "\n".join([heading, "", note, told, "", to_markdown(table)])
        console.print(f"written: {write_run(arguments.output, f'{name}-', run, text)}")
