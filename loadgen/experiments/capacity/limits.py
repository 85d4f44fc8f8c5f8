"""The limits that a probe is held against: whether it meets them, and when it can only miss them. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.load.records import Run, TurnRecord
from loadgen.load.trace import Trace
from loadgen.stats import Distribution, Summary

TTFT = "first token of a resumed turn"
TPOT = "time per token"

SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Miss:
    """A limit that p95 is over, both in seconds."""

    what: str
    limit_s: float
    p95_s: float


def misses(summary: Summary, plan: CapacityPlan) -> tuple[Miss, ...]:
    """The limits that the probe missed, the first token's first."""
    figures: tuple[tuple[str, float, Distribution | None], ...] = (
        (TTFT, plan.slo_ttft_s, summary.ttft_resumed_s),
        (TPOT, plan.slo_tpot_s, summary.tpot_s),
    )
    return tuple(
        Miss(what, limit, found.p95) for what, limit, found in figures if found is not None and found.p95 > limit
    )


class Hopes:
    """Follows one probe. What has been read of its run is not read again."""

    def __init__(self, plan: CapacityPlan, trace: Trace) -> None:
        self._plan = plan
        self._ttft_over = self._tpot_over = self._read = 0
        self._ttft_fatal = fatal(sum(len(agent.turns) - 1 for agent in trace))
        self._tpot_fatal = fatal(sum(turn.completion_tokens > 1 for agent in trace for turn in agent.turns))

    def are_gone(self, run: Run) -> bool:
        """Whether the probe can only fail: something failed, or so many turns are over a limit that p95 will be."""
        self._count(run.turns[self._read :])
        self._read = len(run.turns)
        over = self._ttft_over >= self._ttft_fatal or self._tpot_over >= self._tpot_fatal
        return over or bool(run.failures)

    def _count(self, turns: Iterable[TurnRecord]) -> None:
        for turn in turns:
            self._ttft_over += turn.turn > 0 and turn.ttft_s > self._plan.slo_ttft_s
            self._tpot_over += turn.tpot_s is not None and turn.tpot_s > self._plan.slo_tpot_s


def fatal(samples: int) -> float:
    """How many of so many samples put their p95 over a limit that they are over, wherever the others lie."""
    return samples - math.floor(SHARE * (samples - 1)) if samples else math.inf
