"""Histograms as Prometheus' own client writes them, against quantiles of the values that went in."""

from __future__ import annotations

import math

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from loadgen.targets.histogram import Bucket, between, quantile, read_buckets

BOUNDS = [0.1, 0.2, 0.3, 0.4, 0.5]


def metrics(histogram: str, values: list[float]) -> str:
    registry = CollectorRegistry()
    made = Histogram(histogram, "For this test", ["kind"], buckets=BOUNDS, registry=registry)
    for index, value in enumerate(values):
        made.labels("even" if index % 2 else "odd").observe(value)
    return generate_latest(registry).decode()


def read(values: list[float]) -> list[Bucket]:
    buckets = read_buckets(metrics("signal_seconds", values), "signal_seconds")
    assert buckets is not None
    return buckets


def test_all_labels_are_counted_and_the_last_bucket_has_everything() -> None:
    assert read([0.05, 0.15, 0.15, 9.0]) == [
        Bucket(0.1, 1),
        Bucket(0.2, 3),
        Bucket(0.3, 3),
        Bucket(0.4, 3),
        Bucket(0.5, 3),
        Bucket(math.inf, 4),
    ]


def test_another_histogram_is_none() -> None:
    assert read_buckets(metrics("other_seconds", [0.1]), "signal_seconds") is None


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_quantile_is_right_to_within_a_bucket(share: float) -> None:
    values = [float(value) for value in np.random.default_rng(3).uniform(0, 0.5, 1000)]

    assert quantile(read(values), share) == pytest.approx(np.quantile(values, share), abs=0.02)


def test_only_what_came_between_two_readings_counts() -> None:
    slow, fast = [0.45] * 100, [0.05] * 10

    assert quantile(between(read(slow), read(slow + fast)), 0.99) <= 0.1


def test_beyond_the_last_bound_the_bound_is_all_that_is_known() -> None:
    assert quantile(read([7.0]), 0.5) == 0.5


def test_an_empty_histogram_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="empty"):
        quantile(between(read([0.1]), read([0.1])), 0.5)
