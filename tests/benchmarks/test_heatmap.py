"""Figures of the heatmap."""

from __future__ import annotations

from benchmarks.heatmap import HeatmapRun, Sight, figures_of


def test_the_median_is_held_against_both_targets() -> None:
    sights = [Sight(seconds, size) for seconds, size in ((1.0, 99_000), (2.5, 101_000), (1.5, 101_000))]
    seconds, size = figures_of(HeatmapRun(model="m", cores=2, positions=64, layers=30, sights=sights))
    assert seconds.target is not None
    assert seconds.target.is_met(seconds.spread.median)
    assert size.target is not None
    assert not size.target.is_met(size.spread.median)
