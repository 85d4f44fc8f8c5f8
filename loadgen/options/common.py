"""What every experiment is told besides its targets: texts, and where results go. What a run ends with."""

import argparse
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.load.prompts import Corpus, python_topics, read_texts
from loadgen.report.page import shown_tables, write_outputs
from loadgen.report.report import Report
from loadgen.report.tables import to_rich

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130

Write = Callable[[Report, Path], Sequence[Path]]


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


def whole_model(given: str | Path) -> str:
    """A folder by its whole path; anything else, such as `random:tiny-llama`, as it is."""
    path = Path(given).expanduser()
    return str(path.absolute()) if path.exists() else f"{given}"


def finish(report: Report, options: argparse.Namespace, write: Write = write_outputs) -> int:
    """Print the machine and the tables, then write the files and print their paths; returns the exit code.

    In this order, so that a full disk does not hide the figures. Raises what `write` does. The report is given what
    only the command line knows: how it was called, and when.
    """
    report = replace(report, command=options.command, started_at=options.started_at)
    output = Console(highlight=False)
    output.print(f"on {report.machine}", markup=False, soft_wrap=True)
    output.print(to_rich(shown_tables(report)))
    for path in write(report, make_output(options)):
        output.print(f"results: {path}", markup=False, soft_wrap=True)
    if report.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if report.succeeded else EXIT_FAILED


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """In the block SIGTERM does what Ctrl-C does, so that no server outlives the run that started it.

    Where Ctrl-C is ignored, as by what a shell runs in the background, SIGTERM raises KeyboardInterrupt all the same.
    """

    def hear(_number: int, _frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
