"""One run of the trace on one cluster that is up, with all that is done to it meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from client.transport import AsyncTransport
from loadgen.experiments.cluster.agent import ClusterAgents
from loadgen.experiments.cluster.checking import check_histories, check_owners, compare, routing_of
from loadgen.experiments.cluster.faults import Faults
from loadgen.experiments.cluster.findings import Findings
from loadgen.experiments.cluster.hashing import HashAgents
from loadgen.experiments.cluster.hosting import Cluster
from loadgen.experiments.cluster.moving import Mover
from loadgen.experiments.cluster.plan import ClusterPlan, Router
from loadgen.experiments.cluster.twin import Answers, Prompts
from loadgen.experiments.density.measuring import few_collections
from loadgen.experiments.density.runner import OnChange, Runner
from loadgen.load.corpus import Corpus
from loadgen.load.trace import Trace
from loadgen.load.workload import Replay, Workload
from loadgen.results.failures import noting


@dataclass(frozen=True, slots=True)
class Work:
    """What every cluster gets, and what a single server says to it. `model` is what `djinn serve --model` takes."""

    plan: ClusterPlan
    load: Workload | Replay
    trace: Trace
    corpus: Corpus
    model: str
    prompts: Prompts = ()
    answers: Answers = ()


async def measure(
    cluster: Cluster, router: Router, work: Work, findings: Findings, on_change: OnChange, say: Callable[[str], None]
) -> None:
    """Run the trace, and then ask whether all is there, unless it was cancelled. `on_change` gets the run."""
    signals, timeout_s = work.load.signals, work.plan.turn_timeout
    owned = ClusterAgents(cluster.spec, signals, findings) if router is Router.OWNER else None
    agents = owned or HashAgents(cluster.urls, timeout_s, signals, findings)
    runner = Runner(agents, on_change, timeout_s)
    transport = cluster.spec.transport()
    try:
        with few_collections():
            async with _disturbing(cluster, work, owned, findings, transport, say) as faults:
                run = await runner.execute(work.trace, work.prompts)
                if not run.interrupted:
                    await faults.over()
        findings.interrupted = run.interrupted
        compare(agents.every, work.answers, findings)
        if run.interrupted or owned is None:  # a hash leaves sessions wherever it has been
            return
        with noting("the end", findings.failures):
            await cluster.until_whole()
            findings.routing = await routing_of(cluster)
            await check_histories(transport, owned.every, findings)
            await check_owners(cluster, owned.every, findings)
    finally:
        await transport.close()


@asynccontextmanager
async def _disturbing(
    cluster: Cluster,
    work: Work,
    owned: ClusterAgents | None,
    findings: Findings,
    transport: AsyncTransport,
    say: Callable[[str], None],
) -> AsyncIterator[Faults]:
    """Moves and faults, in the block. What ends them early is written down."""
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    plan, names, seed = work.plan, sorted(cluster.urls), work.load.seed
    faults = Faults(cluster, plan, findings, clock, say, seed)
    doing = [("kills", asyncio.create_task(faults.kill())), ("the drain", asyncio.create_task(faults.drain()))]
    if owned is not None and plan.moves(len(names), Router.OWNER):
        mover = Mover(transport, owned, names, findings, clock, seed)
        doing.append(("moves", asyncio.create_task(mover.run(plan.moves_per_second))))
    try:
        yield faults
    finally:
        for part, task in doing:
            task.cancel()
            with suppress(asyncio.CancelledError), noting(part, findings.failures):
                await task
