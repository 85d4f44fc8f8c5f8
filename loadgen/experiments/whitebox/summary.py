"""From what was seen to figures, and what they are held against. Times in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from loadgen.experiments.whitebox.findings import Arm, Findings, RoundTrip, Trial, Waited, Window
from loadgen.stats import Distribution
from loadgen.targets.histogram import Bucket, quantile

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The trials at one layer: tokens that are the same with pauses as without, of all that there are."""

    layer: int
    trials: int
    matching: int
    tokens: int
    prefill_pauses: int
    decode_pauses: int
    paused_everywhere: bool

    @property
    def share(self) -> float:
        """1 if every token is the same."""
        return self.matching / self.tokens


@dataclass(frozen=True, slots=True)
class Latency:
    """How long something took, over one position (a decoded token) or over `positions` of a prompt, on average."""

    what: str
    positions: float
    seconds: Distribution


@dataclass(frozen=True, slots=True)
class ServerLatency:
    """Quantiles of one of the server's own histograms, by the rule of Prometheus: as exact as its buckets."""

    count: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """The steered turns at one layer: how many say something else, and the token at which they begin to."""

    layer: int
    turns: int
    differing: int
    first: Distribution | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Rates against each other, pair by pair: the middle of all pairs, and the bounds of its 95 % confidence interval.

    The bounds are the two pairs with so many below and above them as the sign test has it (Conover, Practical
    Nonparametric Statistics, section 3.2). Fewer than six pairs are too few for it: the bounds are the two ends then.
    """

    median: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio | None:
        """None if there are none."""
        if not ratios:
            return None
        ordered, outside = sorted(ratios), _pairs_outside(len(ratios))
        return cls(median(ordered), ordered[outside], ordered[-1 - outside], len(ordered))


def _pairs_outside(pairs: int) -> int:
    """How many pairs may be left out at each end, for the true median to be between the others with 95 %."""
    outside, tail = 0, 1.0
    while 2 * (tail := tail + math.comb(pairs, outside + 1)) <= (1 - CONFIDENCE) * 2**pairs:
        outside += 1
    return outside


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of one target comes to. What could not be measured is empty or None.

    `saved` is the engine's own time for each pause. `kept` is what each arm keeps of the rate without breakpoints;
    `kept_by_others`, of their throughput, what others keep while one is paused.
    """

    accuracy: list[Accuracy]
    latency: list[Latency]
    server: dict[str, ServerLatency]
    divergence: list[Divergence]
    kept: dict[Arm, Ratio | None]
    kept_by_others: Ratio | None


def summarize(findings: Findings) -> Summary:
    """The figures of a run, complete or not."""
    layers = sorted({trial.layer for trial in findings.trials})
    return Summary(
        accuracy=[_accuracy(layer, [t for t in findings.trials if t.layer == layer]) for layer in layers],
        latency=[*_round_trips(findings.round_trips), *_saved(findings)],
        server={name: found for name, buckets in findings.histograms.items() if (found := _server(buckets))},
        divergence=_divergence(findings),
        kept={arm: Ratio.of([r.ratio(arm) for r in findings.rates]) for arm in (Arm.UNMATCHED, Arm.STEERED)},
        kept_by_others=Ratio.of(list(pair_windows(findings.windows))),
    )


def pair_windows(windows: Iterable[Window]) -> Iterable[float]:
    """For each repeat that is whole, the rate with a session paused over the rate without."""
    rates = {(window.repeat, window.paused): window.tokens_per_s for window in windows}
    repeats = sorted({repeat for repeat, _ in rates})
    whole = [repeat for repeat in repeats if (repeat, True) in rates and (repeat, False) in rates]
    return (rates[repeat, True] / rates[repeat, False] for repeat in whole)


def _accuracy(layer: int, trials: Sequence[Trial]) -> Accuracy:
    return Accuracy(
        layer=layer,
        trials=len(trials),
        matching=sum(trial.matching for trial in trials),
        tokens=sum(max(len(trial.plain), len(trial.paused)) for trial in trials),
        prefill_pauses=sum(trial.prefill_pauses for trial in trials),
        decode_pauses=sum(trial.decode_pauses for trial in trials),
        paused_everywhere=all(trial.paused_everywhere for trial in trials),
    )


def _round_trips(found: Sequence[RoundTrip]) -> Iterable[Latency]:
    for waited in Waited:
        mine = [trip for trip in found if trip.waited is waited]
        yield from _by_size(waited.value, [(trip.positions, trip.seconds) for trip in mine])


def _saved(findings: Findings) -> Iterable[Latency]:
    return _by_size("engine: put a checkpoint aside", [(one.positions, one.seconds) for one in findings.saved])


def _by_size(what: str, samples: Sequence[tuple[int, float]]) -> Iterable[Latency]:
    """One position and many are told apart: a decoded token and a prompt."""
    for of_a_prompt in (False, True):
        chosen = [sample for sample in samples if (sample[0] > 1) == of_a_prompt]
        seconds = Distribution.of([seconds for _, seconds in chosen])
        if seconds is not None:
            yield Latency(what, sum(positions for positions, _ in chosen) / len(chosen), seconds)


def _server(buckets: Sequence[Bucket]) -> ServerLatency | None:
    if not buckets[-1].count:
        return None
    p50, p90, p99 = (quantile(list(buckets), share) for share in (0.5, 0.9, 0.99))
    return ServerLatency(int(buckets[-1].count), p50, p90, p99)


def _divergence(findings: Findings) -> list[Divergence]:
    found = []
    for layer in sorted({turn.layer for turn in findings.steered}):
        places = [turn.differs_at for turn in findings.steered if turn.layer == layer]
        differing = [place for place in places if place is not None]
        found.append(Divergence(layer, len(places), len(differing), Distribution.of(differing)))
    return found
