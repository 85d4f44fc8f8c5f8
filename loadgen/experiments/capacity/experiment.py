"""How many agents a server holds while resumed turns and tokens stay within limits.

A search over the number of agents; each of its probes is a run of the density experiment. All targets get the same
agents at the same number, and have the same room for KV.
"""

import asyncio
from collections.abc import Sequence

from rich.console import Console

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.experiments.capacity.hosting import Host, hosting
from loadgen.experiments.capacity.plan import CapacityPlan
from loadgen.experiments.capacity.probing import plan_probe, probe
from loadgen.experiments.capacity.report import CapacityReport, Findings, Probe, TargetReport
from loadgen.experiments.capacity.search import Search
from loadgen.experiments.capacity.wording import title, verdict_line
from loadgen.experiments.density.live import WARMS_UP, watching
from loadgen.experiments.density.reaching import ILL, check_running, unusable
from loadgen.load.corpus import Corpus
from loadgen.results.failures import Failure, ending_early
from loadgen.results.inputs import Server, Texts
from loadgen.targets import TargetSpec
from loadgen.targets.access import Access


async def run_capacity(
    targets: Sequence[Access], plan: CapacityPlan, corpus: Corpus, console: Console
) -> CapacityReport:
    """Search on every target, one after the other.

    Raises `LoadgenError` if a target that is up cannot serve the load, before the first probe, or if the first target
    cannot be measured at all. One that cannot be measured later is a part of the report. Cancelled once a probe is
    over, it returns the probes until then.
    """
    await check_running(targets, plan_probe(plan, plan.most, corpus))
    reports: list[TargetReport] = []
    for target in targets:
        report = await _TargetSearch(target, plan, corpus, console).run(first=not reports)
        reports.append(report)
        if report.findings.interrupted:
            break
    return CapacityReport(
        seed=plan.load.seed,
        plan=plan,
        arrive_within_s=plan.arrive_within_s * plan.load.time_scale,
        texts=Texts.of(corpus),
        targets=tuple(reports),
    )


class _TargetSearch:
    """The search on one target."""

    def __init__(self, target: Access, plan: CapacityPlan, corpus: Corpus, console: Console) -> None:
        self._target, self._plan, self._corpus, self._console = target, plan, corpus, console
        self._search = Search(plan.least, plan.most, plan.rounds)
        self._findings = Findings()
        self._spec = target.running or TargetSpec(target.name, "")

    async def run(self, *, first: bool) -> TargetReport:
        """Search to the end. Raises what stands in the way of the first probe if the target is the `first` one."""
        findings = self._findings
        try:
            with ending_early(findings):
                async with hosting(self._target) as host:
                    await self._search_on(host)
                await asyncio.sleep(0)  # to stop a server blocks the event loop: a Ctrl-C meanwhile is heard here
        except (DjinnError, LoadgenError) as error:
            if first and not findings.probes and not isinstance(error, ILL):
                raise unusable(self._target.name, error) from error
            findings.failures.append(Failure("the search", type(error).__name__, str(error)))
        if first and findings.interrupted and not findings.probes:
            raise asyncio.CancelledError
        return TargetReport(Server.of(self._spec), findings)

    async def _search_on(self, host: Host) -> None:
        findings, search = self._findings, self._search
        while (agents := search.next()) is not None:
            self._spec = await host.reach(findings.probes[-1] if findings.probes else None)
            done = await self._probe(agents)
            search.add(agents, done.held)
            findings.probes.append(done)
            findings.held, findings.failed = search.held, search.failed
            self._console.print(verdict_line(self._target.name, done), markup=False, highlight=False, soft_wrap=True)
        findings.complete = True

    async def _probe(self, agents: int) -> Probe:
        work = plan_probe(self._plan, agents, self._corpus)
        shown = title(self._target.name, len(self._findings.probes) + 1, agents, self._findings)
        with watching(self._console, (shown,), work.trace, repeats=1) as view:
            watched = view.begin(shown, 0)
            watched.says = WARMS_UP
            turn = self._search.round_of(agents)
            return await probe(self._spec, self._plan, work, agents, turn, watched.changed)
