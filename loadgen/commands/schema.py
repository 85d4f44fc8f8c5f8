"""`python -m loadgen schema`: the form of a result file."""

import argparse
import sys

from rich.console import Console

from loadgen.experiments.capacity.report import CapacityReport
from loadgen.experiments.cluster.report import ClusterReport
from loadgen.experiments.density.report import DensityReport
from loadgen.experiments.kv.report import KVReport
from loadgen.experiments.migrate.report import MigrateReport
from loadgen.experiments.oversubscribe.report import OversubscribeReport
from loadgen.experiments.resume_latency.report import ResumeReport
from loadgen.experiments.soak.report import SoakReport
from loadgen.experiments.weights.report import WeightsReport
from loadgen.experiments.whitebox.report import WhiteboxReport
from loadgen.options.common import EXIT_OK
from loadgen.results.files import Result
from loadgen.results.schema import schema_text

RESULTS: dict[str, type[Result]] = {
    "capacity": CapacityReport,
    "cluster": ClusterReport,
    "density": DensityReport,
    "kv": KVReport,
    "migrate": MigrateReport,
    "oversubscribe": OversubscribeReport,
    "resume-latency": ResumeReport,
    "soak": SoakReport,
    "weights": WeightsReport,
    "whitebox": WhiteboxReport,
}
"""What each experiment writes; its schema is published as docs/schemas/EXPERIMENT.json."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which one."""
    parser.add_argument("of", metavar="EXPERIMENT", choices=sorted(RESULTS), help="whose results")


def run(options: argparse.Namespace, _progress: Console) -> int:
    """Print the schema; returns the exit code."""
    sys.stdout.write(schema_text(RESULTS[options.of]))
    return EXIT_OK
