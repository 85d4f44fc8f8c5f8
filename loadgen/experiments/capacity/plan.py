"""What the search for a server's capacity does, decided before it runs."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from loadgen.errors import LoadgenError
from loadgen.load.measurement import Measurement, Slo
from loadgen.load.trace import Trace
from loadgen.load.workload import Workload, plan_trace

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
    least: int = 1
    most: int = 256
    rounds: int = 1
    slo_ttft_s: float = 1.0
    slo_tpot_s: float = 0.25
    turn_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for flag, limit in (
            ("--slo-ttft", self.slo_ttft_s),
            ("--slo-tpot", self.slo_tpot_s),
            ("--turn-timeout", self.turn_timeout_s),
        ):
            if not 0 < limit < math.inf:
                raise LoadgenError(f"{flag} must be above 0 and finite, in seconds, not {limit:g}")
        if self.least < 1:
            raise LoadgenError(f"--least must be at least 1, not {self.least}")
        if self.most < self.least:
            raise LoadgenError(f"--most must be at least --least, which is {self.least}, not {self.most}")
        if self.rounds < 1:
            raise LoadgenError(f"--rounds must be at least 1, not {self.rounds}")
        if self.load.turns < 2:
            raise LoadgenError(f"--turns must be at least 2, for a turn to be resumed, not {self.load.turns}")

    @property
    def measurement(self) -> Measurement:
        """How each probe is measured."""
        return Measurement(turn_timeout_s=self.turn_timeout_s, slo=Slo(self.slo_ttft_s, self.slo_tpot_s))

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
