"""How well a server carries many agents that spend most of their time thinking.

Every agent generates, thinks, and comes back with its whole conversation as context. The targets get the same agents,
one target after the other: same arrivals, same think times, same text, same numbers of tokens.
"""

import asyncio
from collections.abc import Iterator, Sequence

from rich.console import Console

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.experiments.density.live import WARMS_UP, Watched, watching
from loadgen.experiments.density.measuring import Attempt, Plan, measure
from loadgen.experiments.density.reaching import ILL, check_running, unusable
from loadgen.experiments.density.report import DensityReport, TargetReport
from loadgen.load.prompts import fingerprint
from loadgen.load.records import Failure
from loadgen.load.trace import planned_turns, trace_sha256
from loadgen.results.inputs import Server, Texts
from loadgen.stats import spread, summarize
from loadgen.targets import TargetSpec
from loadgen.targets.access import Access

Attempts = dict[str, list[Attempt]]


async def run_density(targets: Sequence[Access], plan: Plan, console: Console) -> DensityReport:
    """Run the load on every target, as often as it is to be measured.

    Raises `LoadgenError` if a target that is up cannot serve the load, before the first run, or if the first target
    cannot be measured at all. One that cannot be measured later costs nothing of what has been, and one that is ill
    is a result: the report says so. Cancelled once a run has begun, it returns what was seen until then.
    """
    attempts: Attempts = {target.name: [] for target in targets}
    await check_running(targets, plan)
    with watching(console, tuple(attempts), plan.trace, plan.measurement.repeats) as view:
        for repeat, target in _schedule(targets, plan.measurement.repeats):
            watched = view.begin(target.name, repeat)
            attempts[target.name].append(await _attempt(target, plan, repeat, watched, attempts, console))
            if attempts[target.name][-1].run.interrupted:
                break
    return DensityReport(
        seed=plan.load.seed,
        workload=plan.load,
        trace_sha256=trace_sha256(plan.trace),
        measurement=plan.measurement,
        texts=Texts.of(plan.corpus),
        targets=tuple(_report(name, done, plan) for name, done in attempts.items() if done),
    )


def _schedule(targets: Sequence[Access], repeats: int) -> Iterator[tuple[int, Access]]:
    """Every target once in each repeat, in alternating order: what drifts with time falls on all of them alike."""
    for repeat in range(repeats):
        for target in targets if repeat % 2 == 0 else reversed(targets):
            yield repeat, target


async def _attempt(
    target: Access, plan: Plan, repeat: int, watched: Watched, so_far: Attempts, console: Console
) -> Attempt:
    """One run. What stands in its way is raised while there is nothing to lose, and else becomes the run's failure."""
    attempt = Attempt(target.running)
    try:
        async with target.reach() as spec:
            attempt.spec = spec
            if spec.model is None:  # it is a Djinn, which has a page
                console.print(f"{target.name} shows its sessions at {spec.url}", markup=False)
            watched.says = WARMS_UP
            await measure(attempt, spec, plan, repeat, watched.changed)
        await asyncio.sleep(0)  # to stop a server blocks the event loop: a Ctrl-C meanwhile is heard here
    except (DjinnError, LoadgenError) as error:
        if not _is_something_seen(attempt, so_far) and not isinstance(error, ILL):
            raise unusable(target.name, error) from error
        attempt.run.failures.append(Failure(None, None, 0.0, type(error).__name__, str(error)))
    except asyncio.CancelledError:
        if not _is_something_seen(attempt, so_far):
            raise
        attempt.run.interrupted = True
    return attempt


def _is_something_seen(attempt: Attempt, so_far: Attempts) -> bool:
    return attempt.has_run or any(so_far.values())


def _report(name: str, attempts: Sequence[Attempt], plan: Plan) -> TargetReport:
    planned, measurement = planned_turns(plan.trace), plan.measurement
    spec = next((attempt.spec for attempt in reversed(attempts) if attempt.spec is not None), TargetSpec(name, ""))
    runs = tuple(attempt.run for attempt in attempts)
    return TargetReport(
        server=Server.of(spec),
        prompts_sha256=fingerprint([agent for attempt in attempts for agent in attempt.prompts]),
        runs=runs,
        summary=summarize(runs, planned, measurement),
        spread=spread([summarize([run], planned, measurement) for run in runs]),
    )
