"""The same trace for real and simulated, side by side."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

import psutil

from loadgen.errors import LoadgenError
from loadgen.experiments.density.measuring import Attempt, Plan, measure
from loadgen.experiments.simulate.costs import Costs, mean_of
from loadgen.experiments.simulate.plan import ClusterPlan, Policy
from loadgen.experiments.simulate.world.simulation import simulate
from loadgen.load.corpus import Corpus
from loadgen.load.measurement import Measurement
from loadgen.load.records import Run
from loadgen.load.trace import AgentPlan, planned_turns, trace_sha256
from loadgen.load.workload import Workload, plan_trace
from loadgen.results.verdicts import Verdict, verdict
from loadgen.stats import Distribution
from loadgen.targets import TargetSpec

DRAWS = 50
"""Simulations of each run, with other steps drawn: the turns of all count, as a p99 of one goes by a turn or two."""
TOLERANCE = 0.15
"""The error that a simulated percentile may have."""
FIGURES = ("first token, first turn", "first token, resumed turns", "time per output token")
PERCENTILES = ("p50", "p99")


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure of the same turns, in seconds."""

    measured: Distribution
    simulated: Distribution

    def error(self, percentile: str) -> float:
        """How far the simulated percentile is from the measured, over the measured."""
        measured: float = getattr(self.measured, percentile)
        simulated: float = getattr(self.simulated, percentile)
        return simulated / measured - 1 if measured else 0.0


@dataclass(frozen=True, slots=True)
class Validation:
    """One trace, by its seed; that with `seed` None has the turns of all together. `others_cpus`: how many processors
    were busy on average with what is neither the target nor the load generator; None if that is not known.
    """

    seed: int | None
    trace_sha256: tuple[str, ...]
    turns: int
    pairs: dict[str, Pair]
    others_cpus: float | None


Samples = dict[str, list[float]]


Measure = Callable[[], Awaitable[Costs]]
"""Measures the costs of the target once more."""


async def validate(
    spec: TargetSpec,
    load: Workload,
    seeds: Iterable[int],
    corpus: Corpus,
    plan: ClusterPlan,
    costs: list[Costs],
    again: Measure | None,
) -> tuple[Validation, ...]:
    """Run the load with each of the seeds on the target, and simulate it `DRAWS` times.

    Costs are measured `again` after each run, and go to the end of `costs`: a simulation goes by those around its run,
    as a machine is not as fast in every minute. None: it goes by the last of `costs`.

    Raises `LoadgenError` if a turn failed: what it would have cost the others is not known.
    """
    found, measured_of_all, simulated_of_all = list[Validation](), list[Samples](), list[Samples]()
    for number, seed in enumerate(seeds):
        seeded = replace(load, seed=seed)
        trace = plan_trace(seeded)
        attempt = Attempt(spec)
        busy_s, own_s = _busy_s(), time.process_time()
        await measure(attempt, spec, Plan(seeded, trace, corpus, Measurement()), number, lambda run, clocks: None)
        others_s = _busy_s() - busy_s - (time.process_time() - own_s)
        if attempt.run.failures or len(attempt.run.turns) < planned_turns(trace):
            first = attempt.run.failures[0].message if attempt.run.failures else "the run was interrupted"
            raise LoadgenError(f"seed {seed}: not every turn completed: {first}")
        around = costs[-1:]
        if again is not None:
            costs.append(await again())
            around = costs[-2:]
        measured_of_all.append(_measured(attempt.run))
        simulated_of_all.append(_drawn(plan, mean_of(around), trace, load))
        pairs = _pairs(measured_of_all[-1:], simulated_of_all[-1:])
        others = _others(attempt.run, others_s)
        found.append(Validation(seed, (trace_sha256(trace),), len(attempt.run.turns), pairs, others))
    shas = tuple(sha for each in found for sha in each.trace_sha256)
    together = _pairs(measured_of_all, simulated_of_all)
    known = [each.others_cpus for each in found if each.others_cpus is not None]
    others = sum(known) / len(known) if known else None
    return (*found, Validation(None, shas, sum(each.turns for each in found), together, others))


def judge(validations: Iterable[Validation]) -> tuple[Verdict, ...]:
    """Every figure of every trace against `TOLERANCE`."""
    return tuple(
        verdict(
            f"{'all seeds' if each.seed is None else f'seed {each.seed}'}: {figure}, {percentile}",
            f"error at most {TOLERANCE:.0%}",
            f"{pair.error(percentile):+.0%}",
            abs(pair.error(percentile)) <= TOLERANCE,
        )
        for each in validations
        for figure, pair in each.pairs.items()
        for percentile in PERCENTILES
    )


def _busy_s() -> float:
    """Seconds that all processors have worked."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _others(run: Run, others_s: float) -> float | None:
    """Processors busy with others, where `others_s` has the target's time in it too."""
    told = [sample.cpu_s for sample in run.samples if sample.cpu_s is not None]
    if len(told) < 2 or not run.duration_s:
        return None
    return max(0.0, others_s - (told[-1] - told[0])) / run.duration_s


def _measured(run: Run) -> Samples:
    first, resumed = ([turn.ttft_s for turn in run.turns if (turn.turn > 0) is later] for later in (False, True))
    tpots = [tpot for turn in run.turns if (tpot := turn.tpot_s) is not None]
    return dict(zip(FIGURES, (first, resumed, tpots), strict=True))


def _drawn(plan: ClusterPlan, costs: Costs, trace: tuple[AgentPlan, ...], load: Workload) -> Samples:
    """The turns of all simulations of a trace."""
    samples: Samples = {figure: [] for figure in FIGURES}
    for draw in range(DRAWS):
        done = simulate(replace(plan, draw=draw), Policy.OWNER, costs, trace, load.signals, load.system_tokens)
        tally = done.tally
        found = (tally.ttfts(resumed=False), tally.ttfts(resumed=True), tally.tpots())
        for figure, values in zip(FIGURES, found, strict=True):
            samples[figure] += values
    return samples


def _pairs(measured: list[Samples], simulated: list[Samples]) -> dict[str, Pair]:
    pairs = {}
    for figure in FIGURES:
        sides = [Distribution.of(value for one in each for value in one[figure]) for each in (measured, simulated)]
        if sides[0] is not None and sides[1] is not None:
            pairs[figure] = Pair(sides[0], sides[1])
    return pairs
