"""One probe: a run of density, which ends as soon as it can only fail, and the server that it runs on."""

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.experiments.density.running import Attempt, OnChange, Plan, measure
from loadgen.load.corpus import Corpus
from loadgen.load.records import Run, TurnRecord
from loadgen.load.trace import Trace, planned_turns
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import plan_trace
from loadgen.report.text import counts, in_seconds
from loadgen.stats import Distribution, Summary, summarize
from loadgen.targets import TargetSpec
from loadgen.targets.access import Access

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
