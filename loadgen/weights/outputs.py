"""All files of a run."""

from __future__ import annotations

from pathlib import Path

from loadgen.reporting.outputs import write_outputs
from loadgen.weights.csv import write_csv
from loadgen.weights.page import make_page
from loadgen.weights.report import WeightsReport


def write_weights(report: WeightsReport, folder: Path) -> list[Path]:
    """Write weights-TIME.json, .html, .csv and -FIGURE.png; returns their paths. Raises OSError."""
    written = write_outputs(report, make_page(report), folder)
    return [*written, write_csv(report, written[0].with_suffix(".csv"))]
