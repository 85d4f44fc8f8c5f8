"""From rounds to ratios. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.generators.measured import Measured
from loadgen.results.spread import Spread

TOLERANCE = 0.10
"""How far the generators may be apart."""
FIGURES = {"ttft_p50_s": "TTFT, median (s)", "ttft_mean_s": "TTFT, mean (s)", "tokens_per_s": "Output (tokens/s)"}


@dataclass(frozen=True, slots=True)
class Round:
    """Both generators with the same arrivals, one right after the other.

    `first` is the name of the one that began; `other_cpu_share` what processes outside the benchmark had of the cores.
    """

    number: int
    load: str
    seed: int
    first: str
    own: Measured
    rival: Measured
    other_cpu_share: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure under one load: the median over rounds, with the lowest and the highest.

    `ratio` is that of the ratios of each round, ours to theirs: what slows the machine down for a while slows down
    both.
    """

    load: str
    figure: str
    own: Spread
    rival: Spread
    ratio: Spread

    @property
    def agrees(self) -> bool:
        """Whether the two are at most `TOLERANCE` apart."""
        return abs(self.ratio.median - 1.0) <= TOLERANCE


def compare(rounds: Sequence[Round]) -> list[Comparison]:
    """Every figure under every load, loads in order of appearance."""
    loads = dict.fromkeys(entry.load for entry in rounds)
    return [_compare(load, figure, rounds) for load in loads for figure in FIGURES]


def _compare(load: str, figure: str, rounds: Sequence[Round]) -> Comparison:
    of_load = [entry for entry in rounds if entry.load == load]
    own: list[float] = [getattr(entry.own, figure) for entry in of_load]
    rival: list[float] = [getattr(entry.rival, figure) for entry in of_load]
    ratios = [ours / theirs for ours, theirs in zip(own, rival, strict=True)]
    return Comparison(load, figure, Spread.over(own), Spread.over(rival), Spread.over(ratios))
