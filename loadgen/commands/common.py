"""What every experiment is told: targets, their keys, texts, and where results go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loadgen.corpus import Corpus, python_topics, read_trace
from loadgen.errors import LoadgenError
from loadgen.targets import TargetSpec

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130


def add_common(parser: argparse.ArgumentParser, *, target: str, target_help: str) -> None:
    """The options of every experiment."""
    parser.add_argument("--target", action="append", required=True, metavar=target, help=target_help)
    parser.add_argument("--api-key", action="append", default=[], metavar="NAME=KEY", help="key of a target")
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="folder for the results (default: runs)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="conversations to take the texts from, as JSON lines (default: Python's help topics)",
    )


def read_corpus(options: argparse.Namespace) -> Corpus:
    """The texts. Raises `LoadgenError`."""
    return python_topics() if options.trace is None else read_trace(options.trace)


def make_output(options: argparse.Namespace) -> Path:
    """The folder for the results. Raises `LoadgenError` if there can be none."""
    output: Path = options.output
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadgenError(f"cannot write to {output}: {error}") from error
    return output


def read_specs(options: argparse.Namespace) -> list[TargetSpec]:
    """The targets with their keys. Raises `LoadgenError` for a name given twice and for a key without a target."""
    specs = [TargetSpec.parse(text) for text in options.target]
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise LoadgenError(f"every target needs a name of its own: {', '.join(names)}")
    keys = _read_keys(options.api_key)
    if unknown := keys.keys() - set(names):
        raise LoadgenError(f"--api-key for no target: {', '.join(sorted(unknown))}")
    return [replace(spec, api_key=keys.get(spec.name)) for spec in specs]


def _read_keys(texts: Sequence[str]) -> dict[str, str]:
    keys = {}
    for text in texts:
        name, separator, key = text.partition("=")
        if not separator:
            raise LoadgenError("--api-key is NAME=KEY")
        keys[name] = key
    return keys
