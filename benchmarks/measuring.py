"""What measurements have in common: how much of the cores went to whom, since a figure taken while others compute is no
figure; spreads with other bounds than the lowest and the highest; and real text that every machine has."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import numpy as np
from tokenizers import Tokenizer

from loadgen.load.prompts import python_topics
from loadgen.report.tables import Spread

DISTURBED_SHARE = 0.02
"""Where other processes had more of the cores than this, a measurement is reported as disturbed."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuMeter:
    """Counts, from its creation on, the share of `cores` that neither idled nor ran our own processes.

    own_cpu_s: CPU seconds so far of everything that belongs to the measurement, on those cores.
    """

    def __init__(self, cores: list[int], own_cpu_s: Callable[[], float]) -> None:
        self._cores = cores
        self._own_cpu_s = own_cpu_s
        self._start = time.perf_counter()
        self._busy = busy_cpu_s(cores)
        self._own = own_cpu_s()

    def other_share(self) -> float:
        """Between 0 (nobody else) and 1. Time that the hypervisor took away counts as somebody else's."""
        capacity = (time.perf_counter() - self._start) * len(self._cores)
        other = (busy_cpu_s(self._cores) - self._busy) - (self._own_cpu_s() - self._own)
        return min(max(other / capacity, 0.0), 1.0)


def busy_cpu_s(cores: list[int]) -> float:
    """CPU seconds since boot in which these cores did not idle. Fields of /proc/stat: see proc(5)."""
    wanted = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / TICKS_PER_S


RESAMPLES = 2000
CONFIDENCE = 0.95


def middle_half(values: list[float]) -> Spread:
    """With the lower and the upper quartile: of many values, the extremes only say how long was measured.

    Raises statistics.StatisticsError for fewer than two values.
    """
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def ratio_of_medians(values: list[float], base: list[float]) -> Spread:
    """The median of `values` over that of `base`, with the bounds of its 95 % confidence interval.

    Entry k of both was measured in round k. The interval is a percentile bootstrap over rounds (Efron and Tibshirani,
    An Introduction to the Bootstrap, chapter 13) from a fixed seed. Raises ValueError unless both have as many entries.
    """
    pairs = np.array(list(zip(values, base, strict=True)))
    rounds = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    above, below = np.moveaxis(np.median(pairs[rounds], axis=1), -1, 0)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(above / below, [tail, 1 - tail]).tolist()
    return Spread(median(values) / median(base), low, high, len(values))


class TokenSource:
    """Deals disjoint slices of `tokens`."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._next = 0

    def take(self, count: int) -> list[int]:
        """The next `count` tokens. Raises ValueError if so many are not left."""
        piece = self._tokens[self._next : self._next + count]
        if len(piece) < count:
            raise ValueError(f"the text has {len(self._tokens)} tokens, too few for this plan")
        self._next += count
        return piece


def read_text_tokens(model: Path) -> list[int]:
    """Python's help topics in the model's own tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode("\n".join(python_topics().documents), add_special_tokens=False).ids
    return ids
