"""`python -m loadgen density`: how well a server carries many agents that spend most of their time thinking.

Every agent generates, thinks, and comes back with its whole conversation as context. The targets get the same agents,
one target after the other: same arrivals, same think times, same text, same numbers of tokens.
"""

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.experiments.density import rows
from loadgen.experiments.density.live import WARMS_UP, Watched, watching
from loadgen.experiments.density.running import ILL, Attempt, Plan, check_running, measure, unusable
from loadgen.load.prompts import fingerprint
from loadgen.load.records import Failure, Run
from loadgen.load.trace import final_tokens, planned_turns, trace_sha256, write_trace
from loadgen.load.workload import Measurement, load_in_words, plan_trace
from loadgen.options.common import add_common, finish, make_output, read_corpus
from loadgen.options.parser import add_plan_options, read_plan
from loadgen.options.targets import add_targets, add_workload_options, read_targets, read_workload
from loadgen.report.origin import Server, Texts
from loadgen.report.page import write_outputs
from loadgen.report.report import Report, result_path
from loadgen.report.tables import all_of, none_of, pivot
from loadgen.stats import Summary, summarize
from loadgen.targets import TargetSpec
from loadgen.targets.base import Access

TITLE = "Density: agents that generate, think and come back"


@dataclass(slots=True)
class Measured:
    """What was seen of a target: every repeat, and what they come to together."""

    name: str
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        """Every repeat."""
        return [attempt.run for attempt in self.attempts]

    def summary(self, plan: Plan) -> Summary:
        """Of all repeats."""
        return summarize(self.runs, planned_turns(plan.trace), plan.measurement)

    @property
    def spec(self) -> TargetSpec:
        """Where it was, as far as that is known."""
        return next((a.spec for a in reversed(self.attempts) if a.spec is not None), TargetSpec(self.name, ""))


async def run_density(targets: Sequence[Access], plan: Plan, console: Console) -> list[Measured]:
    """Run the load on every target, as often as it is to be measured.

    Raises `LoadgenError` if a target that is up cannot serve the load, before the first run, or if the first target
    cannot be measured at all. One that cannot be measured later costs nothing of what has been, and one that is ill
    is a result: the report says so. Cancelled once a run has begun, it returns what was seen until then.
    """
    found = {target.name: Measured(target.name) for target in targets}
    await check_running(targets, plan)
    with watching(console, plan.trace, plan.measurement.repeats) as view:
        for repeat, target in _schedule(targets, plan.measurement.repeats):
            watched, one = view.begin(target.name, repeat), found[target.name]
            anything = any(each.attempts for each in found.values())
            one.attempts.append(attempt := Attempt(target.running))
            await _attempt(target, plan, repeat, watched, attempt, console, anything)
            if attempt.run.interrupted:
                break
    return [each for each in found.values() if each.attempts]


def _schedule(targets: Sequence[Access], repeats: int) -> Iterator[tuple[int, Access]]:
    """Every target once in each repeat, in alternating order: what drifts with time falls on all of them alike."""
    for repeat in range(repeats):
        for target in targets if repeat % 2 == 0 else reversed(targets):
            yield repeat, target


async def _attempt(
    target: Access, plan: Plan, repeat: int, watched: Watched, attempt: Attempt, console: Console, anything: bool
) -> None:
    """One run. What stands in its way is raised while there is nothing to lose, and else becomes the run's failure."""
    try:
        async with target.reach() as spec:
            attempt.spec = spec
            if spec.model is None:  # it is a Djinn, which has a page
                console.print(f"{target.name} shows its sessions at {spec.url}", markup=False)
            watched.says = WARMS_UP
            await measure(attempt, spec, plan, repeat, watched.changed)
        await asyncio.sleep(0)  # to stop a server blocks the event loop: a Ctrl-C meanwhile is heard here
    except (DjinnError, LoadgenError) as error:
        if not (attempt.has_run or anything) and not isinstance(error, ILL):
            raise unusable(target.name, error) from error
        attempt.run.failures.append(Failure(None, None, 0.0, type(error).__name__, str(error)))
    except asyncio.CancelledError:
        if not (attempt.has_run or anything):
            raise
        attempt.run.interrupted = True


def report_of(plan: Plan, found: Sequence[Measured], title: str = TITLE) -> Report:
    """What was seen of all targets."""
    summaries = {one.name: one.summary(plan) for one in found}
    runs = {one.name: one.runs for one in found}
    planned, measured = planned_turns(plan.trace), plan.measurement
    figures = [
        each
        for name, seen in summaries.items()
        for each in (
            all_of("turns completed", seen.turns_completed, seen.turns_planned, {"target": name}),
            none_of("errors between turns", sum(seen.other_errors.values()), {"target": name}),
        )
    ]
    headlines = [
        figure
        for one in found
        for figure in rows.headlines(
            one.name, summaries[one.name], [summarize([run], planned, measured) for run in one.runs]
        )
    ]
    beside = "In brackets: times the first target's." if len(found) > 1 else ""
    return Report(
        experiment="density",
        title=title,
        lead=(load_in_words(plan.load), _measured_in_words(plan)),
        plan={"workload": asdict(plan.load), "measurement": asdict(measured)},
        figures=(*figures, *headlines),
        tables=(
            pivot("Side by side", headlines, "target", beside, ratios=True),
            rows.latency_table(summaries),
            rows.total_table(summaries),
            rows.moved_table(summaries),
            rows.failure_table(runs),
            *rows.raw_tables(runs, measured.warmup_s),
            rows.wait_table(summaries),
        ),
        charts=tuple(rows.charts(list(summaries))),
        servers=tuple(Server.of(one.spec) for one in found),
        texts=Texts.of(plan.corpus),
        inputs={
            "trace_sha256": trace_sha256(plan.trace),
            **{
                f"prompts_sha256 of {one.name}": fingerprint([agent for each in one.attempts for agent in each.prompts])
                for one in found
            },
        },
        interrupted=any(run.interrupted for every in runs.values() for run in every),
    )


def _measured_in_words(plan: Plan) -> str:
    measured = plan.measurement
    limits = {"TTFT": measured.slo_ttft_s, "time per output token": measured.slo_tpot_s}
    good = " and ".join(f"{what} within {1000 * limit:g} ms" for what, limit in limits.items() if limit is not None)
    return (
        f"{measured.repeats} {'repeat' if measured.repeats == 1 else 'repeats'}, warm-up of {measured.warmup_s:g} s"
        + (f"; a turn is good with {good}." if good else ".")
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, what the agents are like, and how they are measured."""
    add_targets(parser, openai=True)
    add_common(parser)
    add_workload_options(parser)
    add_plan_options(parser, Measurement)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    load, corpus, measurement = read_workload(options), read_corpus(options), read_plan(options, Measurement)
    plan = Plan(load, plan_trace(load), corpus, measurement)
    targets = read_targets(options, context_tokens=final_tokens(plan.trace))
    make_output(options)
    found = asyncio.run(run_density(targets, plan, progress))

    def write(report: Report, folder: Path) -> Sequence[Path]:
        """Also the trace, with which it can be run again."""
        replay = result_path(folder, "trace", report.started_at, "jsonl")
        write_trace(plan.trace, replay)
        return [*write_outputs(report, folder), replay]

    return finish(report_of(plan, found), options, write)
