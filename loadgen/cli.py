"""The command line: `python -m loadgen EXPERIMENT ...`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console

from loadgen.corpus import python_topics, read_trace
from loadgen.errors import LoadgenError
from loadgen.experiments.density import run_density
from loadgen.report import Report, write_json
from loadgen.tables import render
from loadgen.targets import TargetSpec
from loadgen.workload import Signals, Workload

DEFAULTS = Workload()

EXIT_OK = 0
EXIT_TURNS_FAILED = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one experiment.

    Returns the exit code: 0 if every turn of every target succeeded, 1 if one did not, 2 if the run could not
    start, 130 if it was interrupted.
    """
    options = _parser().parse_args(argv)
    errors = Console(stderr=True, highlight=False)
    try:
        report = _density(options, errors)
    except LoadgenError as error:
        errors.print(f"loadgen: {error}", markup=False, soft_wrap=True)
        return EXIT_UNUSABLE
    except KeyboardInterrupt:
        errors.print("loadgen: interrupted before the first turn was sent")
        return EXIT_INTERRUPTED
    output = Console(highlight=False)
    output.print(render(report))
    output.print(f"results: {write_json(report, options.output)}", markup=False, soft_wrap=True)
    if any(target.run.interrupted for target in report.targets):
        return EXIT_INTERRUPTED
    succeeded = all(target.summary.succeeded for target in report.targets)
    return EXIT_OK if succeeded else EXIT_TURNS_FAILED


def _density(options: argparse.Namespace, progress: Console) -> Report:
    workload = Workload(**{field.name: getattr(options, field.name) for field in fields(Workload)})
    corpus = python_topics() if options.trace is None else read_trace(options.trace)
    specs = _specs(options.target, options.api_key)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadgenError(f"cannot write to {options.output}: {error}") from error
    return asyncio.run(run_density(specs, workload, corpus, progress))


def _specs(targets: Sequence[str], api_keys: Sequence[str]) -> list[TargetSpec]:
    """The targets with their keys. Raises `LoadgenError` for a name given twice and for a key without a target."""
    specs = [TargetSpec.parse(text) for text in targets]
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise LoadgenError(f"every target needs a name of its own: {', '.join(names)}")
    keys = dict(_name_and_key(text) for text in api_keys)
    if unknown := keys.keys() - set(names):
        raise LoadgenError(f"--api-key for no target: {', '.join(sorted(unknown))}")
    return [replace(spec, api_key=keys.get(spec.name)) for spec in specs]


def _name_and_key(text: str) -> tuple[str, str]:
    name, separator, key = text.partition("=")
    if not separator:
        raise LoadgenError("--api-key is NAME=KEY")
    return name, key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadgen", description="Measure servers under the load of agents.")
    experiments = parser.add_subparsers(dest="experiment", required=True)
    density = experiments.add_parser("density", help="agents that generate, think and come back")
    _add_targets(density)
    _add_workload(density)
    return parser


def _add_targets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="NAME=URL[#MODEL]",
        help="with #MODEL an OpenAI-compatible server, without it Djinn; repeat to compare",
    )
    parser.add_argument("--api-key", action="append", default=[], metavar="NAME=KEY", help="key of a target")
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="folder for the JSON (default: runs)"
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    """The fields of `Workload`, with its defaults."""
    for name, kind, text in (
        ("agents", int, "how many agents arrive"),
        ("rate", float, "arrivals per second, a Poisson process; inf: all at once"),
        ("context", int, "tokens of the first prompt"),
        ("turns", int, "turns of each agent"),
        ("system_tokens", int, "tokens at the start of the first prompt that all agents share"),
        ("resume_tokens", int, "tokens of new text in each later turn"),
        ("completion_tokens", int, "tokens generated in each turn"),
        ("seed", int, "of arrivals, think times and texts"),
        ("time_scale", float, "factor on arrival and think times; 0.1 is ten times as fast"),
    ):
        default = getattr(DEFAULTS, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")
    low, high = DEFAULTS.think
    parser.add_argument(
        "--think",
        type=_think,
        default=DEFAULTS.think,
        metavar="LOW:HIGH",
        help=f"seconds between turns, drawn evenly (default: {low:g}:{high:g})",
    )
    parser.add_argument(
        "--signals",
        type=Signals,
        choices=list(Signals),
        default=DEFAULTS.signals,
        help=f"what Djinn is told of think times (default: {DEFAULTS.signals})",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="conversations to take the texts from, as JSON lines (default: Python's help topics)",
    )


def _think(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be LOW:HIGH in seconds, not {text!r}") from None
