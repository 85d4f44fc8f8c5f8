"""Samples made by hand."""

from __future__ import annotations

from loadgen.experiments.weights.findings import Findings, Sample, Way
from loadgen.experiments.weights.plan import Cell

ONE = Cell(1)
STREAMED_BYTES = 1000
PLAIN = 4000.0
"""Bytes a second of plain copies: those of a pass take a quarter of a second."""


def sample(
    way: Way, first_s: float, tokens_per_s: float, *, repeat: int = 0, cell: Cell = ONE, answer: str = "a"
) -> Sample:
    """What a way had."""
    bandwidth = None if way is Way.RESIDENT else STREAMED_BYTES * tokens_per_s / cell.batch
    return Sample(way, cell.batch, cell.cold, repeat, first_s, tokens_per_s, bandwidth, answer)


def plain(bytes_per_s: float = PLAIN, *, repeat: int = 0, cell: Cell = ONE) -> Sample:
    """Copies and nothing else."""
    return Sample(Way.PLAIN, cell.batch, cell.cold, repeat, bytes_per_s=bytes_per_s)


def findings(*samples: Sample, device: str = "cpu") -> Findings:
    """Of these samples."""
    return Findings(list(samples), streamed_bytes={Way.STREAMED: STREAMED_BYTES}, device=device)
