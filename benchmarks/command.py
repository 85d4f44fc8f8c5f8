"""A benchmark as a command: read the options, measure, show the figures, keep them."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rich.console import Console

from benchmarks.cpu_meter import DISTURBED_SHARE
from benchmarks.record import RESULTS, Run, write_run
from loadgen.errors import LoadgenError
from loadgen.options.common import EXIT_FAILED, EXIT_OK, EXIT_UNUSABLE, sigterm_as_interrupt
from loadgen.processes.folders import default_model
from loadgen.report.figures import Figure
from loadgen.report.tables import figure_table, to_markdown, to_rich


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


PlanT = TypeVar("PlanT")
MeasuredT = TypeVar("MeasuredT", bound=HasShare)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun(Run):
    """A run of a benchmark of Djinn alone. `settings`: what the server or the engine was given."""

    plan: object
    settings: object
    figures: list[Figure]
    measured: HasShare


@dataclass(frozen=True, slots=True)
class Benchmark(Generic[PlanT, MeasuredT]):
    """A benchmark of Djinn alone. `quick` and `full` say how much is measured; only what is measured in full is
    written. `settings` describes what is measured of a model, `spreads` the plan and what spreads mean.
    """

    name: str
    title: str
    description: str | None
    quick: PlanT
    full: PlanT
    measure: Callable[[Path, PlanT, list[int]], MeasuredT]
    figures_of: Callable[[MeasuredT], list[Figure]]
    settings: Callable[[Path], object]
    spreads: Callable[[PlanT], str]

    def main(self) -> int:
        """Run it as the command line asks; returns the process's exit status."""
        arguments = make_parser(f"python -m benchmarks.{self.name}", self.description).parse_args()
        return exit_status(arguments.model, lambda: self._run(arguments, Console()))

    def _run(self, arguments: argparse.Namespace, console: Console) -> None:
        cores = bind_to_cores(arguments.cores)
        plan = self.quick if arguments.quick else self.full
        with console.status("measuring: some minutes, less with --quick"):
            measured = self.measure(arguments.model, plan, cores)
        run = self.describe(arguments.model, plan, measured)
        console.print(f"on {run.place_and_time}", highlight=False)
        console.print(to_rich([figure_table(self.title, run.figures)]))
        if measured.other_cpu_share > DISTURBED_SHARE:
            console.print(f"disturbed: other processes had {measured.other_cpu_share:.0%} of the cores")
        if not arguments.quick:
            console.print(f"written: {self.write(arguments.output, run, plan)}")

    def describe(self, model: Path, plan: PlanT, measured: MeasuredT) -> OwnRun:
        """The record, without the folders of this machine."""
        return OwnRun(
            model=model.name,
            plan=plan,
            settings=self.settings(model),
            figures=self.figures_of(measured),
            measured=measured,
        )

    def write(self, folder: Path, run: OwnRun, plan: PlanT) -> Path:
        """Writes `NAME-FLAGS-CORES-DATE.json` and `.md`; returns the latter."""
        lines = [
            f"# {self.title}: {run.model} on {run.place_and_time}",
            "",
            self.spreads(plan),
            f"Processes outside the benchmark had at most {run.measured.other_cpu_share:.1%} of the cores.",
            "",
            to_markdown(figure_table(self.title, run.figures)),
        ]
        return write_run(folder, f"{self.name}-", run, "\n".join(lines))
