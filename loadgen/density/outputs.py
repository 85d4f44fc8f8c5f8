"""All files of a density run."""

from __future__ import annotations

from pathlib import Path

from loadgen.density.csv import write_csv
from loadgen.density.page import make_page
from loadgen.density.report import DensityReport
from loadgen.reporting.files import result_path
from loadgen.reporting.outputs import write_outputs
from loadgen.trace import Trace, write_trace


def write_density(report: DensityReport, trace: Trace, folder: Path) -> list[Path]:
    """Write density-TIME.json, .html, .csv and -FIGURE.png, and trace-TIME.jsonl, with which it can be run again.

    Returns their paths. Raises OSError, and `LoadgenError` if the trace cannot be written.
    """
    written = write_outputs(report, make_page(report), folder)
    lines = write_csv(report, written[0].with_suffix(".csv"))
    replay = result_path(folder, "trace", report.started_at, "jsonl")
    write_trace(trace, replay)
    return [*written, lines, replay]
