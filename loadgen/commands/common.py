"""What every experiment is told besides its targets: texts, and where results go. What a run ends with."""

from __future__ import annotations

import argparse
from pathlib import Path

from loadgen.corpus import Corpus, python_topics, read_texts
from loadgen.errors import LoadgenError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of every experiment."""
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="folder for the results (default: runs)"
    )
    parser.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="conversations to take the texts from, as JSON lines (default: Python's help topics)",
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
        raise LoadgenError(f"cannot write to {output}: {error}") from error
    return output
