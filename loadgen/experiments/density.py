"""How well a server carries many agents that spend most of their time thinking.

Every agent generates, thinks, and comes back with its whole conversation as context. The targets get the same agents,
one target after the other: same arrivals, same think times, same text, same numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console

from client import DjinnError
from loadgen.corpus import Corpus
from loadgen.errors import LoadgenError
from loadgen.progress import show_progress
from loadgen.prompts import TokenIds, cut_prompts, fingerprint
from loadgen.records import TurnClock
from loadgen.report import Report, TargetReport
from loadgen.runner import Runner
from loadgen.stats import summarize
from loadgen.targets import Target, TargetSpec, connect
from loadgen.workload import Workload, plan_agents

EXPERIMENT = "density"


@dataclass(frozen=True, slots=True)
class PreparedTarget:
    """A target that has answered, and what its agents will say to it."""

    target: Target
    prompts: tuple[tuple[TokenIds, ...], ...]


async def run_density(specs: Sequence[TargetSpec], workload: Workload, corpus: Corpus, console: Console) -> Report:
    """Run the load on every target. Raises `LoadgenError`, before the first run, if a target cannot serve it.

    Cancelled during a run, it returns what was seen until then.
    """
    started_at = datetime.now(UTC)
    reports: list[TargetReport] = []
    async with AsyncExitStack() as stack:
        targets = [connect(spec, workload.signals) for spec in specs]
        for target in targets:
            stack.push_async_callback(target.close)
        prepared = [await _prepare(target, workload, corpus) for target in targets]
        for ready in prepared:
            reports.append(await _measure(ready, workload, console))
            if reports[-1].run.interrupted:
                break
    return Report(EXPERIMENT, started_at, workload, corpus, reports)


async def _prepare(target: Target, workload: Workload, corpus: Corpus) -> PreparedTarget:
    """Cut the prompts and run one turn of an agent too many: what is slow only once stays out of the measurement."""
    try:
        await target.prepare(workload.final_tokens)
        *prompts, spare = await cut_prompts(workload, corpus, target.tokenize, workload.agents + 1)
        agent = target.new_agent()
        try:
            await agent.run_turn(spare[0], workload.completion_tokens, TurnClock())
        finally:
            await agent.close()
    except DjinnError as error:
        raise LoadgenError(f"target {target.spec.name} cannot be measured: {error}") from error
    return PreparedTarget(target, tuple(prompts))


async def _measure(ready: PreparedTarget, workload: Workload, console: Console) -> TargetReport:
    spec = ready.target.spec
    with show_progress(console, spec.name, workload.agents * workload.turns) as on_change:
        runner = Runner(ready.target, workload.completion_tokens, on_change)
        run = await runner.execute(plan_agents(workload), ready.prompts)
    return TargetReport(spec, fingerprint(ready.prompts), run, summarize(run, workload))
