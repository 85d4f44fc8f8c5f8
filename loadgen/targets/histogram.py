"""Quantiles of a Prometheus histogram over a stretch of time. Pure."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from loadgen.load.think import InfinityAsNull


@dataclass(frozen=True, slots=True)
class Bucket:
    """How many observations were at most `upper` (infinite for the last bucket, which JSON writes as null)."""

    upper: InfinityAsNull
    count: float


def read_buckets(metrics: str, name: str) -> list[Bucket] | None:
    """The buckets of histogram `name` in the text of `/metrics`, labels summed up; None if there is no such one."""
    counts: defaultdict[float, float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == f"{name}_bucket":
                counts[float(sample.labels["le"])] += sample.value
    return [Bucket(upper, counts[upper]) for upper in sorted(counts)] or None


def between(before: list[Bucket], after: list[Bucket]) -> list[Bucket]:
    """What was observed between two readings of one histogram."""
    return [Bucket(new.upper, new.count - old.count) for old, new in zip(before, after, strict=True)]


def quantile(buckets: list[Bucket], share: float) -> float:
    """The value that `share` of the observations do not exceed, by the rule of Prometheus' `histogram_quantile`:
    linear within a bucket, the largest finite bound beyond it. Raises ValueError if nothing was observed.
    """
    rank = share * buckets[-1].count
    if not rank:
        raise ValueError("the histogram is empty")
    for below, bucket in pairwise([Bucket(0.0, 0.0), *buckets[:-1]]):
        if bucket.count >= rank:
            part = (rank - below.count) / (bucket.count - below.count)
            return below.upper + (bucket.upper - below.upper) * part
    return buckets[-2].upper
