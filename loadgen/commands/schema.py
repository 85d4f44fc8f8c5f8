"""`python -m loadgen schema`: the form of a result file."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from loadgen.commands.common import EXIT_OK
from loadgen.density.report import DensityReport
from loadgen.kv.report import KVReport
from loadgen.migrate.report import MigrateReport
from loadgen.oversubscribe.report import OversubscribeReport
from loadgen.reporting.files import Result
from loadgen.reporting.schema import schema_text
from loadgen.resume.report import ResumeReport
from loadgen.weights.report import WeightsReport
from loadgen.whitebox.report import WhiteboxReport

RESULTS: dict[str, type[Result]] = {
    "density": DensityReport,
    "kv": KVReport,
    "migrate": MigrateReport,
    "oversubscribe": OversubscribeReport,
    "resume-latency": ResumeReport,
    "weights": WeightsReport,
    "whitebox": WhiteboxReport,
}
"""What each experiment writes; its schema is published as docs/schemas/EXPERIMENT.json."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which one."""
    parser.add_argument("of", choices=sorted(RESULTS), help="whose results")


def run(options: argparse.Namespace, _progress: Console) -> int:
    """Print the schema; returns the exit code."""
    sys.stdout.write(schema_text(RESULTS[options.of]))
    return EXIT_OK
