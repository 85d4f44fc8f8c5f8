"""`python -m loadgen schema`: the form of a result file, published as docs/schemas/result.json."""

import argparse
import sys

from rich.console import Console

from loadgen.options.common import EXIT_OK
from loadgen.report.report import schema_text


def add_options(_parser: argparse.ArgumentParser) -> None:
    """None: all experiments write the same."""


def run(_options: argparse.Namespace, _progress: Console) -> int:
    """Print the schema; returns the exit code."""
    sys.stdout.write(schema_text())
    return EXIT_OK
