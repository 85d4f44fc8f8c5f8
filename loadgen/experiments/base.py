"""What every experiment on Djinn servers has in common: its command, one server after the other, and its report."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.load.prompts import Corpus
from loadgen.options.common import add_common, finish, make_output, read_corpus
from loadgen.options.parser import add_plan_options, read_plan
from loadgen.options.targets import add_targets, read_targets, run_on, with_disk
from loadgen.report.origin import Server, Texts
from loadgen.report.report import Chart, Failure, Report
from loadgen.report.tables import Figure, Table
from loadgen.targets import TargetSpec
from loadgen.targets.djinn import Subject

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


P = TypeVar("P", bound="DataclassInstance")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Bench(Generic[P]):
    """A server under an experiment, what is done to it, and with which texts. `others` are servers beside it."""

    subject: Subject
    plan: P
    corpus: Corpus
    console: Console
    options: argparse.Namespace
    others: Sequence[TargetSpec] = ()


@dataclass(slots=True)
class Found:
    """What was seen of one server. It grows as the experiment goes on."""

    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False

    def of(self, target: str) -> Found:
        """The same beside what was seen of other targets: everything says of which target it is."""
        return Found(
            [replace(each, by={"target": target, **each.by}) for each in self.figures],
            [replace(table, rows=[{"target": target, **row} for row in table.rows]) for table in self.tables],
            [
                replace(each, title=f"{each.title}: {target}", where={**each.where, "target": target})
                for each in self.charts
            ],
            self.notes,
            {f"{name} of {target}": value for name, value in self.inputs.items()},
            [replace(each, part=f"{target}: {each.part}") for each in self.failures],
            self.interrupted,
        )


@dataclass(frozen=True, slots=True)
class DjinnExperiment(Generic[P, S]):
    """An experiment as a command. `lead` says what is done; `prepare` asks a server what it runs and cuts texts, before
    anything is measured on any; `measure` does the rest, and is told of a Ctrl-C by `CancelledError`.

    With `disk` servers that are started have a disk tier.
    """

    name: str
    title: str
    plan: type[P]
    lead: Callable[[P, Corpus], str]
    prepare: Callable[[Bench[P]], Awaitable[S]]
    measure: Callable[[Bench[P], S, Found], Awaitable[None]]
    disk: bool = False
    more_options: Callable[[argparse.ArgumentParser], None] = lambda _parser: None
    others: Callable[[argparse.Namespace], list[str]] = lambda _options: []
    """Targets beside those of --target. Raises `LoadgenError` if what was given does not go together."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """The targets, and the fields of the plan."""
        add_targets(parser)
        add_common(parser)
        add_plan_options(parser, self.plan)
        self.more_options(parser)

    def run(self, options: argparse.Namespace, progress: Console) -> int:
        """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
        plan, corpus = read_plan(options, self.plan), read_corpus(options)
        count, others = len(options.target), self.others(options)
        every = argparse.Namespace(**{**vars(options), "target": [*options.target, *others]})
        targets = read_targets(every)
        make_output(options)

        async def on_all(specs: list[TargetSpec]) -> Report:
            return await self._run_on(specs[:count], specs[count:], plan, corpus, progress, options)

        with with_disk(targets) if self.disk else nullcontext(targets) as ready:
            report = run_on(ready, on_all)
        return finish(report, options)

    async def _run_on(
        self,
        specs: Sequence[TargetSpec],
        others: Sequence[TargetSpec],
        plan: P,
        corpus: Corpus,
        console: Console,
        options: argparse.Namespace,
    ) -> Report:
        """Prepare all servers, and then measure each, up to one that was interrupted."""
        found: list[Found] = []
        async with AsyncExitStack() as stack:
            benches = [Bench(Subject(spec), plan, corpus, console, options, others) for spec in specs]
            for bench in benches:
                stack.push_async_callback(bench.subject.close)
            for bench, prepared in [(bench, await self._prepare(bench)) for bench in benches]:
                found.append(Found())
                await self.measure(bench, prepared, found[-1])
                if found[-1].interrupted:
                    break
        if len(specs) > 1:
            found = [one.of(spec.name) for one, spec in zip(found, specs, strict=False)]
        return Report(
            experiment=self.name,
            title=self.title,
            lead=(self.lead(plan, corpus),),
            plan=asdict(plan),
            servers=tuple(Server.of(spec) for spec in (*specs, *others)),
            texts=Texts.of(corpus),
            **merged(found),
        )

    async def _prepare(self, bench: Bench[P]) -> S:
        try:
            return await self.prepare(bench)
        except DjinnError as error:
            raise LoadgenError(f"measuring target {bench.subject.spec.name} failed: {error}") from error


def merged(found: Sequence[Found]) -> Mapping[str, Any]:
    """Fields of a report; tables of the same title become one."""
    tables: dict[str, Table] = {}
    for table in (table for one in found for table in one.tables):
        before = tables.get(table.title)
        tables[table.title] = table if before is None else replace(before, rows=[*before.rows, *table.rows])
    return {
        "figures": tuple(each for one in found for each in one.figures),
        "tables": tuple(tables.values()),
        "charts": tuple(each for one in found for each in one.charts),
        "notes": tuple(note for one in found for note in one.notes),
        "inputs": {name: value for one in found for name, value in one.inputs.items()},
        "failures": tuple(each for one in found for each in one.failures),
        "interrupted": any(one.interrupted for one in found),
    }


REFRESHES_PER_S = 4
"""Few, because drawing takes time from the clock that measures."""


@contextmanager
def show_parts(console: Console, target: str, parts: Mapping[str, int]) -> Iterator[Callable[[str], None]]:
    """Show how far each part of an experiment is, of its number of steps; yields what is to be called after a step.

    Where `console` is not a terminal, a line tells of each part that is complete.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, refresh_per_second=REFRESHES_PER_S, disable=not console.is_terminal
    ) as progress:
        tasks = {name: progress.add_task(f"{target}: {name}", total=most, start=False) for name, most in parts.items()}
        left = dict(parts)

        def advance(part: str) -> None:
            progress.start_task(tasks[part])
            progress.advance(tasks[part])
            left[part] -= 1
            if not left[part] and not console.is_terminal:
                console.print(f"{target}: {part} done")

        yield advance
