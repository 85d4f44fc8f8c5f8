"""What the search for a server's capacity does, decided before it runs."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from loadgen.errors import LoadgenError, require_at_least
from loadgen.load.measurement import Measurement
from loadgen.load.trace import Trace
from loadgen.load.workload import Workload, plan_trace
from loadgen.plans import option

ARRIVED = 0.5
"""All agents have arrived, on average, after this share of the shortest thinking time of any of them."""


@dataclass(frozen=True)
class CapacityPlan:
    """Probes of `least` to `most` agents who are all like those of `load`, whose `agents` and `rate` are not used.

    A count is held if p95 of resumed first tokens is at most `slo_ttft_s`, p95 of time per token at most `slo_tpot_s`,
    and no turn fails, in more than half of `rounds`. A turn that takes longer than `turn_timeout_s` has failed.

    Raises `LoadgenError` if a value is outside its range.
    """

    load: Workload
    least: int = option(1, "agents of the first probe")
    most: int = option(256, "agents beyond which nothing is probed")
    rounds: int = option(1, "probes of the two numbers at the border; the majority counts")
    slo_ttft_s: float = option(1.0, "seconds that p95 of resumed first tokens is at most", flag="--slo-ttft")
    slo_tpot_s: float = option(0.25, "seconds per further token that p95 is at most", flag="--slo-tpot")
    turn_timeout_s: float = option(600.0, "seconds after which a turn has failed", flag="--turn-timeout")

    def __post_init__(self) -> None:
        for name in ("slo_ttft_s", "slo_tpot_s", "turn_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise LoadgenError(f"{name} must be above 0 and finite, in seconds, not {getattr(self, name):g}")
        if self.most < self.least:
            raise LoadgenError(f"most must be at least {self.least}, the least, not {self.most}")
        require_at_least(1, self, "least", "rounds")
        if self.load.turns < 2:
            raise LoadgenError(f"turns must be at least 2, for a turn to be resumed, not {self.load.turns}")

    @property
    def measurement(self) -> Measurement:
        """How each probe is measured."""
        return Measurement(turn_timeout_s=self.turn_timeout_s, slo_ttft_s=self.slo_ttft_s, slo_tpot_s=self.slo_tpot_s)

    @cached_property
    def arrive_within_s(self) -> float:
        """The mean time until the last agent has arrived, in seconds at `time_scale` 1, whatever their number.

        It is so short that the first agents are still there when the last ones come.
        """
        together = replace(self.load, agents=self.most, rate=math.inf, time_scale=1.0)
        return ARRIVED * min(sum(turn.think_s or 0.0 for turn in agent.turns) for agent in plan_trace(together))

    def load_of(self, agents: int) -> Workload:
        """The load of a probe: equal for equal numbers of agents."""
        within_s = self.arrive_within_s
        return replace(self.load, agents=agents, rate=agents / within_s if within_s else math.inf)

    def texts_of(self, agents: int, turn: int) -> int:
        """A number that no other probe has, round `turn` of that many agents: each has texts that no server knows."""
        return turn * (self.most + 1) + agents

    @property
    def longest(self) -> Trace:
        """The trace of the largest probe, whose longest history no other exceeds."""
        return plan_trace(self.load_of(self.most))
