"""One run of the trace on one target that is up."""

import gc
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from client import DjinnError
from loadgen.experiments.density.runner import CLOSE_TIMEOUT_S, OnChange, Runner, within
from loadgen.load.corpus import Corpus
from loadgen.load.measurement import Measurement
from loadgen.load.prompts import TokenIds, cut_prompts
from loadgen.load.records import Failure, Run
from loadgen.load.trace import AgentPlan, Trace, final_tokens
from loadgen.load.turn_clock import TurnClock
from loadgen.load.workload import Replay, Workload
from loadgen.sampling import sampling
from loadgen.targets import Target, TargetSpec, connect

Prompts = Sequence[Sequence[TokenIds]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What every target gets, and how it is measured."""

    load: Workload | Replay
    trace: Trace
    corpus: Corpus
    measurement: Measurement


@dataclass(slots=True)
class Attempt:
    """One run of one target, with what its agents said; `spec` is None of a target that did not come up.

    It is filled in as the run goes on: what ends it early costs nothing of what has been seen.
    """

    spec: TargetSpec | None
    prompts: Prompts = ()
    run: Run = field(default_factory=Run)

    @property
    def has_run(self) -> bool:
        """Whether the load was on the target, to its end or not."""
        return self.run.duration_s > 0


@asynccontextmanager
async def connected(spec: TargetSpec, plan: Plan) -> AsyncIterator[Target]:
    """A target that has room for the longest history. Raises `LoadgenError` and `client.DjinnError`."""
    target = connect(replace(spec, timeout_s=plan.measurement.turn_timeout_s), plan.load.signals)
    try:
        await target.prepare(final_tokens(plan.trace))
        yield target
    finally:
        await target.close()


async def measure(attempt: Attempt, spec: TargetSpec, plan: Plan, repeat: int, on_change: OnChange) -> None:
    """Run the trace once, as `attempt`. Raises `LoadgenError` and `client.DjinnError` if it cannot even begin.

    `on_change` is called with the run as it goes on.
    """
    async with connected(spec, plan) as target:
        trace = (*plan.trace, _spare(plan.trace))
        *attempt.prompts, spare = await cut_prompts(trace, plan.load, plan.corpus, target.tokenize, repeat)
        failures = await _warm_up(target, trace[-1], spare[0], plan.measurement.turn_timeout_s)
        with few_collections():
            async with sampling(spec) as sampler:

                def changed(run: Run, in_flight: Collection[TurnClock]) -> None:
                    run.samples = sampler.samples
                    on_change(run, in_flight)

                runner = Runner(target, changed, plan.measurement.turn_timeout_s)
                attempt.run = await runner.execute(plan.trace, attempt.prompts)
                attempt.run.samples = sampler.samples
                attempt.run.failures[:0] = failures
            attempt.run.totals = sampler.totals


def _spare(trace: Trace) -> AgentPlan:
    """An agent too many that does the first turn of the first agent."""
    return AgentPlan(0.0, (replace(trace[0].turns[0], think_s=None, announced_s=None),))


async def _warm_up(target: Target, plan: AgentPlan, prompt: TokenIds, timeout_s: float) -> list[Failure]:
    """Run one turn before the clock starts: what is slow only once stays out of the measurement. Its failures."""
    agent = target.new_agent()
    try:
        try:
            await within(timeout_s, agent.run_turn(prompt, plan.turns[0].completion_tokens, TurnClock()))
        finally:
            await within(CLOSE_TIMEOUT_S, agent.close())
    except DjinnError as error:
        return [Failure(None, None, 0.0, type(error).__name__, error.message)]
    return []


@contextmanager
def few_collections() -> Iterator[None]:
    """Keep the garbage collector off everything that is there already: to go through it holds up every event."""
    is_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:  # else all would be thawed, with what somebody else has frozen
            gc.unfreeze()
