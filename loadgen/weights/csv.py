"""Every sample as a line of a table, for other tools."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path

from loadgen.weights.report import WeightsReport

COLUMNS = ("way", "batch", "cold", "chunk_bytes", "repeat", "first_s", "tokens_per_s", "bytes_per_s", "answer")
"""As in `Sample` and `ChunkSample`. What a sample does not have is empty."""


def write_csv(report: WeightsReport, path: Path) -> Path:
    """Write a new file with a header and a line per sample, in order of time; returns `path`. Raises OSError."""
    with path.open("x", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(asdict(sample) | {"cold": int(sample.cold)} for sample in report.findings.samples)
        writer.writerows(asdict(sample) for sample in report.findings.chunks)
    return path
