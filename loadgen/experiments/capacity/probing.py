"""One probe: a run of the density experiment, which ends as soon as it can only fail."""

import asyncio
from collections.abc import Collection

from loadgen.experiments.capacity.limits import Hopes, misses
from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.experiments.capacity.report import Probe
from loadgen.experiments.density.measuring import Attempt, Plan, measure
from loadgen.experiments.density.runner import OnChange
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import fingerprint
from loadgen.load.records import Run
from loadgen.load.trace import planned_turns, trace_sha256
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import plan_trace
from loadgen.stats import summarize
from loadgen.targets import TargetSpec


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
    return _judge(attempt, plan, work, agents, turn, ended_early=ended_early)


def _judge(attempt: Attempt, plan: CapacityPlan, work: Plan, agents: int, turn: int, *, ended_early: bool) -> Probe:
    summary = summarize([attempt.run], planned_turns(work.trace), plan.measurement)
    missed = misses(summary, plan)
    return Probe(
        agents=agents,
        round=turn,
        held=summary.succeeded and not missed,
        ended_early=ended_early,
        misses=missed,
        trace_sha256=trace_sha256(work.trace),
        prompts_sha256=fingerprint(attempt.prompts),
        run=attempt.run,
        summary=summary,
    )
