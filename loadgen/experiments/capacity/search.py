"""What the search for a server's capacity does, decided before it runs; which number of agents is probed next; and
one probe: a run of density, which ends as soon as it can only fail.
"""

import argparse
import asyncio
import math
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from loadgen.errors import LoadgenError, require_at_least
from loadgen.experiments.density.running import Attempt, OnChange, Plan, measure
from loadgen.load.clocks import TurnClock
from loadgen.load.prompts import Corpus
from loadgen.load.records import Run, TurnRecord
from loadgen.load.trace import Trace, planned_turns
from loadgen.load.workload import Measurement, Workload, plan_trace
from loadgen.plans import option
from loadgen.report.tables import counts, in_seconds
from loadgen.stats import Distribution, Summary, summarize
from loadgen.targets import TargetSpec
from loadgen.targets.base import Access

TIERS = {"interactive": (2.0, 1 / 30), "aa": (15.0, 1 / 30)}
"""Seconds to the first token, and per further one: 30 tokens a second. The second is that of AA-AgentPerf."""
ARRIVED = 0.5
"""All agents have arrived, on average, after this share of the shortest thinking time of any of them."""


def read_tier(text: str) -> str:
    """One of `TIERS`."""
    if text not in TIERS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(TIERS)}, not {text!r}")
    return text


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
    tier: str | None = option(None, "limits by name, interactive or aa, with three rounds", read=read_tier, form="NAME")

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


@dataclass(slots=True)
class Search:
    """Finds the greatest number from `least` to `most` that holds, if every greater one fails, by doubling and
    bisection. The two numbers at the border are probed until the majority of `rounds` is certain.

    Where noise makes a number fail and a greater one hold, the smaller one counts.
    """

    least: int
    most: int
    rounds: int = 1
    _votes: dict[int, list[bool]] = field(default_factory=dict)

    def add(self, agents: int, held: bool) -> None:
        """A probe of that many agents is over."""
        self._votes.setdefault(agents, []).append(held)

    def round_of(self, agents: int) -> int:
        """How many probes of that many agents are over."""
        return len(self._votes.get(agents, ()))

    @property
    def held(self) -> int | None:
        """The greatest number that holds so far, below any that failed; None if there is none."""
        failed = self.failed
        holding = (agents for agents in self._votes if self._holds(agents) and (failed is None or agents < failed))
        return max(holding, default=None)

    @property
    def failed(self) -> int | None:
        """The smallest number that has failed so far; None if none has."""
        return min((agents for agents in self._votes if not self._holds(agents)), default=None)

    def next(self) -> int | None:
        """How many agents are probed next; None if the border is certain."""
        for agents, votes in self._votes.items():
            if 2 * sum(votes) == len(votes) and not self._is_settled(agents):
                return agents
        low, high = self.held, self.failed
        if low is None and high is None:
            return self.least
        if low is not None and high is None and low < self.most:
            return min(2 * low, self.most)
        if low is not None and high is not None and high - low > 1:
            return (low + high) // 2
        border = (agents for agents in (low, high) if agents is not None)
        return next((agents for agents in border if not self._is_settled(agents)), None)

    def _holds(self, agents: int) -> bool:
        """Whether more probes held than failed, so far."""
        votes = self._votes[agents]
        return 2 * sum(votes) > len(votes)

    def _is_settled(self, agents: int) -> bool:
        """Whether further rounds could not change the majority."""
        votes = self._votes[agents]
        return 2 * sum(votes) > self.rounds or 2 * votes.count(False) >= self.rounds


TTFT = "first token of a resumed turn"
TPOT = "time per token"
SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Probe:
    """One run of `agents` agents. `ended_early`: it could only fail, so the rest of it was not run. `missed` says which
    limits p95 was over.
    """

    agents: int
    held: bool
    ended_early: bool
    missed: tuple[str, ...]
    run: Run
    summary: Summary

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return "held" if self.held else "failed early" if self.ended_early else "failed"

    @property
    def why(self) -> str:
        """Every reason that it failed for; of one that held, how well it did."""
        errors = {**self.summary.turn_errors, **self.summary.other_errors}
        if not self.held:
            return "; ".join([*self.missed, *([f"errors: {counts(errors)}"] if errors else [])])
        shown = ((TTFT, self.summary.ttft_resumed_s), (TPOT, self.summary.tpot_s))
        return ", ".join(f"{what} p95 {in_seconds(found.p95)}" for what, found in shown if found is not None)


def plan_probe(plan: CapacityPlan, agents: int, corpus: Corpus) -> Plan:
    """What the probe of that many agents runs: the same on every target."""
    load = plan.load_of(agents)
    return Plan(load, plan_trace(load), corpus, plan.measurement)


async def probe(spec: TargetSpec, plan: CapacityPlan, work: Plan, agents: int, turn: int, on_change: OnChange) -> Probe:
    """Run round `turn` of `work`, which is of that many agents. `on_change` is called with the run as it goes on.

    Raises `LoadgenError` and `client.DjinnError` if it cannot begin, and `CancelledError` if it is cancelled.
    """
    attempt, hopes = Attempt(spec), Hopes(plan, work.trace)
    ended_early = False

    def changed(run: Run, in_flight: Collection[TurnClock]) -> None:
        nonlocal ended_early
        on_change(run, in_flight)
        if not ended_early and hopes.are_gone(run):
            ended_early = True
            task.cancel()

    task = asyncio.create_task(measure(attempt, spec, work, plan.texts_of(agents, turn), changed))
    await task
    asker = asyncio.current_task()
    if asker is not None and asker.cancelling():  # the run has taken that for its end
        raise asyncio.CancelledError
    attempt.run.interrupted = False
    summary = summarize([attempt.run], planned_turns(work.trace), plan.measurement)
    missed = misses(summary, plan)
    return Probe(agents, summary.succeeded and not missed, ended_early, missed, attempt.run, summary)


def misses(summary: Summary, plan: CapacityPlan) -> tuple[str, ...]:
    """The limits that the probe missed, the first token's first."""
    figures: tuple[tuple[str, float, Distribution | None], ...] = (
        (TTFT, plan.slo_ttft_s, summary.ttft_resumed_s),
        (TPOT, plan.slo_tpot_s, summary.tpot_s),
    )
    return tuple(
        f"{what}: p95 {in_seconds(found.p95)}, {found.p95 / limit:.3g} times the limit"
        for what, limit, found in figures
        if found is not None and found.p95 > limit
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


class Host:
    """The server of one target: one for all probes, or a new one where the last probe left something behind."""

    def __init__(self, target: Access, stack: AsyncExitStack) -> None:
        self._target = target
        self._stack = stack
        self._spec: TargetSpec | None = None

    async def reach(self, last: Probe | None) -> TargetSpec:
        """The server, with no session on it; `last` is the probe before. Raises `LoadgenError` if it is not up."""
        if self._spec is None or (last is not None and _leaves_something(self._spec, last)):
            await self._stack.aclose()
            self._spec = await self._stack.enter_async_context(self._target.reach())
        return self._spec


def _leaves_something(spec: TargetSpec, last: Probe) -> bool:
    """Whether sessions may still hold KV: agents with tools do not close theirs, and failed turns leave theirs open."""
    return spec.tools or bool(last.run.failures)


@asynccontextmanager
async def hosting(target: Access) -> AsyncIterator[Host]:
    """The server of a target, stopped at the end of the block if the load generator started it."""
    async with AsyncExitStack() as stack:
        yield Host(target, stack)
