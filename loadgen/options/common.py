"""What every experiment is told besides its targets: texts, and where results go. What a run ends with."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.text import Text

from loadgen.errors import LoadgenError
from loadgen.load.corpus import Corpus, python_topics, read_texts
from loadgen.results.files import Result
from loadgen.results.per_target import OneTarget
from loadgen.results.tables import TextTable, to_rich

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130

R = TypeVar("R", bound=Result)
T = TypeVar("T", bound=OneTarget)


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of every experiment that takes texts."""
    add_output(parser)
    parser.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="conversations to take the texts from, as JSON lines (default: Python's help topics)",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Where results go."""
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="folder for the results (default: runs)"
    )


def read_corpus(options: argparse.Namespace) -> Corpus:
    """The texts. Raises `LoadgenError`."""
    return python_topics() if options.texts is None else read_texts(options.texts)


def make_output(options: argparse.Namespace) -> Path:
    """The folder for the results. Raises `LoadgenError` if there can be none."""
    output: Path = options.output
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadgenError(f"cannot write to {output}: {error.strerror}; name another folder with --output") from error
    return output


def with_origin(report: R, options: argparse.Namespace) -> R:
    """The report with what only the command line knows: how it was called, and when."""
    return replace(report, command=options.command, started_at=options.started_at)


def each_target(targets: Iterable[T], tables: Callable[[T], Iterable[TextTable]]) -> Group:
    """The tables of every target for a terminal, below its name."""
    return Group(
        *(
            part
            for target in targets
            for part in (Text(f"{target.server.name}: {target.server.url}"), to_rich(tables(target)))
        )
    )


def finish(report: Result, shown: RenderableType, write: Callable[[], Sequence[Path]]) -> int:
    """Print the machine and the figures, then have the files written and print their paths; returns the exit code.

    In this order, so that a full disk does not hide the figures. Raises what `write` does.
    """
    output = Console(highlight=False)
    output.print(f"on {report.machine}", markup=False, soft_wrap=True)
    output.print(shown)
    for path in write():
        output.print(f"results: {path}", markup=False, soft_wrap=True)
    if report.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if report.succeeded else EXIT_FAILED
