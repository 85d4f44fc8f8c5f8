"""Findings made by hand."""

from __future__ import annotations

from collections.abc import Iterable

from loadgen.experiments.soak.findings import Fault, Findings, Sample

HOUR_S = 3600.0


def samples(sizes: Iterable[tuple[float, int]]) -> list[Sample]:
    """Of seconds and bytes of resident memory."""
    return [Sample(at_s, rss_bytes, 50, 1 << 20, 8) for at_s, rss_bytes in sizes]


def calm() -> Findings:
    """An hour with a fault, in which all was right: every target is met."""
    return Findings(
        duration_s=HOUR_S,
        answers=10,
        tokens=120,
        faults=[Fault("kill of the engine", 1000.0, 1005.0, "ready after 5.0 s")],
        samples=samples((float(second), 1 << 30) for second in range(0, 3600, 10)),
    )
