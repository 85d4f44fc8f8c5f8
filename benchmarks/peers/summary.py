"""From raw rounds to the figures that are compared. Pure."""

from dataclasses import dataclass
from statistics import median

from benchmarks.peers.rounds import Measurement, Round
from loadgen.results.spread import Spread


@dataclass(frozen=True, slots=True)
class Metric:
    """One compared quantity; `key` also names it in the JSON."""

    key: str
    label: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True, slots=True)
class Best:
    """A peer's better data type for one metric."""

    dtype: str
    spread: Spread


def metrics_of(measurement: Measurement) -> dict[Metric, float]:
    """Every metric of one round. The time to first token is the median over the round's long prompts."""
    values = {}
    for key, words in (("throughput", "Throughput"), ("decode_rate", "Decode only")):
        for phase in measurement.decode:
            label = f"{words}, {phase.streams} stream{'s' if phase.streams > 1 else ''}"
            values[Metric(f"{key}_{phase.streams}", label, "tok/s", True)] = getattr(phase, key)
    values[Metric("ttft_1000", "First token of 1,000", "s", False)] = median(measurement.ttft_s)
    return values


def values_by_variant(rounds: list[Round], metric: Metric) -> dict[tuple[str, str], dict[int, float]]:
    """(peer, dtype) -> round number -> value."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for entry in rounds:
        values.setdefault((entry.peer, entry.dtype), {})[entry.number] = metrics_of(entry.measurement)[metric]
    return values


def best_by_peer(rounds: list[Round], metric: Metric) -> dict[str, Best]:
    """Each peer's better data type, judged by the median over rounds."""
    best: dict[str, Best] = {}
    for (peer, dtype), values in values_by_variant(rounds, metric).items():
        candidate = Best(dtype, Spread.over(list(values.values())))
        if peer not in best or _is_better(metric, candidate.spread.median, best[peer].spread.median):
            best[peer] = candidate
    return best


def times_better(rounds: list[Round], metric: Metric, peer: str, baseline: str) -> Spread:
    """How many times better `peer` is than `baseline`, best data type against best, each round against itself.

    2.0 means twice the rate or half the time. Raises KeyError if one of them took no part.
    """
    best = best_by_peer(rounds, metric)
    values = values_by_variant(rounds, metric)
    ours, theirs = (values[name, best[name].dtype] for name in (peer, baseline))
    ratios = [
        ours[number] / theirs[number] if metric.higher_is_better else theirs[number] / ours[number]
        for number in sorted(ours.keys() & theirs.keys())
    ]
    return Spread.over(ratios)


def _is_better(metric: Metric, left: float, right: float) -> bool:
    return left > right if metric.higher_is_better else left < right
