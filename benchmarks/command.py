"""A benchmark of Djinn alone as a command: measure, show the figures, keep them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rich.console import Console

from benchmarks.arguments import exit_status, make_parser
from benchmarks.cpu_meter import DISTURBED_SHARE
from benchmarks.figures import Figure, figure_table
from benchmarks.machine import bind_to_cores
from benchmarks.tables import to_rich


class HasShare(Protocol):
    """What was measured."""

    @property
    def other_cpu_share(self) -> float:
        """Of the cores, what processes outside the benchmark had."""
        ...


class HasFigures(Protocol):
    """The record of a run."""

    @property
    def figures(self) -> list[Figure]:
        """What it comes to."""
        ...


PlanT = TypeVar("PlanT")
MeasuredT = TypeVar("MeasuredT", bound=HasShare)
RunT = TypeVar("RunT", bound=HasFigures)


@dataclass(frozen=True, slots=True)
class Benchmark(Generic[PlanT, MeasuredT, RunT]):
    """`quick` and `full` say how much is measured; only what is measured in full is written."""

    name: str
    description: str | None
    title: str
    quick: PlanT
    full: PlanT
    measure: Callable[[Path, PlanT, list[int]], MeasuredT]
    describe: Callable[[Path, PlanT, list[int], MeasuredT], RunT]
    write: Callable[[Path, RunT], Path]

    def main(self) -> int:
        """Run it as the command line asks; returns the process's exit status."""
        arguments = make_parser(f"python -m {self.name}", self.description).parse_args()
        return exit_status(arguments.model, lambda: self._run(arguments, Console()))

    def _run(self, arguments: argparse.Namespace, console: Console) -> None:
        cores = bind_to_cores(arguments.cores)
        plan = self.quick if arguments.quick else self.full
        with console.status("measuring: some minutes, less with --quick"):
            measured = self.measure(arguments.model, plan, cores)
        run = self.describe(arguments.model, plan, cores, measured)
        console.print(to_rich(figure_table(self.title, run.figures)))
        if measured.other_cpu_share > DISTURBED_SHARE:
            console.print(f"disturbed: other processes had {measured.other_cpu_share:.0%} of the cores")
        if not arguments.quick:
            console.print(f"written: {self.write(arguments.output, run)}")
