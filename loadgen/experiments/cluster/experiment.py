"""Whether a cluster of replicas is one server to its clients, and how its speed grows with its size."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.console import Console

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.experiments.cluster.findings import Findings
from loadgen.experiments.cluster.hosting import cluster_of, single, started
from loadgen.experiments.cluster.measuring import Work, measure
from loadgen.experiments.cluster.pinning import cores_for, own_cores, pinned
from loadgen.experiments.cluster.plan import Router
from loadgen.experiments.cluster.report import ClusterReport, SizeReport, run_name
from loadgen.experiments.cluster.summary import judge
from loadgen.experiments.cluster.twin import prompts_of, right_answers, warm_up
from loadgen.experiments.density.live import Watched, watching
from loadgen.load.measurement import Measurement
from loadgen.load.prompts import fingerprint
from loadgen.load.records import Run
from loadgen.load.trace import final_tokens, planned_turns, trace_sha256
from loadgen.load.turn_clock import TurnClock
from loadgen.results.failures import Failure
from loadgen.results.inputs import Texts
from loadgen.stats import summarize
from loadgen.targets import TargetSpec

TELL_EVERY = 100
"""Turns of the single server between two lines."""


async def run_cluster(work: Work, console: Console) -> ClusterReport:
    """Run the single server, then a cluster of each size. Raises `LoadgenError` if the first cannot begin.

    Cancelled once a run has begun, it returns what was seen until then.
    """
    work = await _with_answers(work, console)
    sizes: list[SizeReport] = []
    runs = tuple(product(work.plan.replicas, work.plan.routers))
    names = tuple(run_name(*each) for each in runs)
    with watching(console, names, work.trace, 1) as view:
        for (count, router), name in zip(runs, names, strict=True):
            cores = cores_for(count, own_cores())
            sizes.append(await _size(count, router, work, cores, view.begin(name, 0), console))
            if sizes[-1].findings.interrupted:
                break
    return ClusterReport(
        seed=work.load.seed,
        plan=work.plan,
        workload=work.load,
        trace_sha256=trace_sha256(work.trace),
        prompts_sha256=fingerprint(work.prompts),
        texts=Texts.of(work.corpus),
        sizes=tuple(sizes),
    )


async def _with_answers(work: Work, console: Console) -> Work:
    """The work with what a single server says. Raises `LoadgenError`."""
    console.print("a single server says what is right", markup=False)
    planned, done = planned_turns(work.trace), 0

    def told() -> None:
        nonlocal done
        done += 1
        if done % TELL_EVERY == 0:
            console.print(f"a single server: {done:,} of {planned:,} turns", markup=False)

    try:
        async with single(work.model, room_of(work)) as server:
            timeout_s = work.plan.turn_timeout
            spec = TargetSpec("the single server", server.url, timeout_s=timeout_s)
            prompts = await prompts_of(spec, work.trace, work.load, work.corpus)
            answers = await right_answers(server.url, work.trace, prompts, timeout_s, told)
    except DjinnError as error:
        raise LoadgenError(f"the single server failed: {error}") from error
    return replace(work, prompts=prompts, answers=answers)


def room_of(work: Work) -> Mapping[str, str]:
    """Of each server: a quarter of all sessions on the device, a half on the host, all on disk."""
    agents, longest = len(work.trace), final_tokens(work.trace)
    return {
        "--kv-device": f"{max(2, agents // 4)}x{longest}",
        "--kv-host": f"{max(2, agents // 2)}x{longest}",
    }


async def _size(
    count: int, router: Router, work: Work, cores: tuple[int, ...], watched: Watched, console: Console
) -> SizeReport:
    """The run of the trace on one cluster. What keeps it from its end is a part of the report."""
    findings, run = Findings(), Run()
    with tempfile.TemporaryDirectory(prefix="loadgen-cluster-") as name:
        room = {**room_of(work), "--kv-disk": f"{2 * len(work.trace)}x{final_tokens(work.trace)}"}
        state, timeout_s = Path(name) / "state", work.plan.turn_timeout
        cluster = cluster_of(count, router, work.model, room, state, work.plan, one_core=bool(cores))

        def changed(seen: Run, in_flight: Collection[TurnClock]) -> None:
            nonlocal run
            run = seen
            watched.changed(seen, in_flight)

        def say(line: str) -> None:
            console.print(f"{run_name(count, router)}: {line}", markup=False)

        try:
            async with started(cluster), pinned(cluster, cores):
                await cluster.until_whole()
                await warm_up(cluster.urls.values(), work.prompts[0][0], timeout_s)
                await measure(cluster, router, work, findings, changed, say)
        except (DjinnError, LoadgenError) as error:
            findings.failures.append(Failure("the run", type(error).__name__, str(error)))
        except asyncio.CancelledError:
            findings.interrupted = True
        shown = cluster.shown(work.model)
    summary = summarize([run], planned_turns(work.trace), Measurement(turn_timeout_s=timeout_s))
    verdicts = judge(count, router, work.plan, summary, findings)
    return SizeReport(count, router, bool(cores), shown, run, summary, findings, verdicts)
