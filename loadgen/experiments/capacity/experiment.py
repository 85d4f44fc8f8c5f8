"""`python -m loadgen capacity`: how many agents a server holds while resumed turns and tokens stay within limits.

A search over the number of agents; each of its probes is a run of density. All targets get the same agents at the same
number, and have the same room for KV.
"""

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.console import Console

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.experiments.capacity.search import (
    TIERS,
    TPOT,
    TTFT,
    CapacityPlan,
    Host,
    Probe,
    Search,
    hosting,
    plan_probe,
    probe,
)
from loadgen.experiments.density.live import WARMS_UP, watching
from loadgen.experiments.density.rows import raw_tables
from loadgen.experiments.density.running import ILL, check_running, unusable
from loadgen.load.prompts import Corpus
from loadgen.load.trace import final_tokens
from loadgen.load.workload import Workload, agent_in_words, arrivals_in_words
from loadgen.options.common import add_common, finish, make_output, read_corpus
from loadgen.options.parser import add_plan_options, read_plan
from loadgen.options.targets import add_targets, read_targets
from loadgen.report.origin import Server, Texts
from loadgen.report.report import Chart, Failure, Report, ending_early
from loadgen.report.tables import Row, Table, counts, duration, exact, milliseconds
from loadgen.targets import TargetSpec
from loadgen.targets.base import Access

DECIDED = ("agents", "rate")
"""Options of the load that the search decides."""
CURVES, RATE = "over agents", "tokens a second of an agent"
CAPTION = (
    "Over the number of agents, the median of several rounds; the dashed line is the limit. A probe that could only "
    "fail ended early: its point is of the turns until then."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, what the agents are like, the limits, and where the search looks."""
    add_targets(parser, openai=True)
    add_common(parser)
    add_plan_options(parser, Workload, but=DECIDED)
    add_plan_options(parser, CapacityPlan)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    limits: dict[str, Any] = {}
    if options.tier is not None:
        first_s, token_s = TIERS[options.tier]
        limits = {"slo_ttft_s": first_s, "slo_tpot_s": token_s, "rounds": 3}
    plan, corpus = read_plan(options, CapacityPlan, load=read_plan(options, Workload), **limits), read_corpus(options)
    targets = read_targets(options, context_tokens=final_tokens(plan.longest))
    make_output(options)
    return finish(asyncio.run(run_capacity(targets, plan, corpus, progress)), options)


@dataclass(slots=True)
class Findings:
    """Everything seen of one target, in order of time. It grows as the search goes on.

    `held` is the number of agents that the server holds, None if it does not hold the least. `failed` is the first
    number that failed, None if the most is held. Both are final once the search is `complete`.
    """

    spec: TargetSpec
    probes: list[Probe] = field(default_factory=list)
    held: int | None = None
    failed: int | None = None
    complete: bool = False
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False

    @property
    def shown(self) -> str:
        """The number of agents that the server holds, or all that is known of it."""
        if self.held is None:
            return "none" if self.complete else "unknown"
        return f"{self.held:,}" if self.complete else f"at least {self.held:,}"

    @property
    def so_far(self) -> str:
        """While the search goes on."""
        held = "" if self.held is None else f"{self.held:,} held"
        failed = "" if self.failed is None else f"{self.failed:,} failed"
        return ", ".join(part for part in (held, failed) if part) or "nothing found yet"


async def run_capacity(targets: Sequence[Access], plan: CapacityPlan, corpus: Corpus, console: Console) -> Report:
    """Search on every target, one after the other.

    Raises `LoadgenError` if a target that is up cannot serve the load, before the first probe, or if the first target
    cannot be measured at all. One that cannot be measured later is a part of the report. Cancelled once a probe is
    over, it returns the probes until then.
    """
    await check_running(targets, plan_probe(plan, plan.most, corpus))
    found: list[Findings] = []
    for target in targets:
        found.append(await _TargetSearch(target, plan, corpus, console).run(first=not found))
        if found[-1].interrupted:
            break
    return _report(found, plan, corpus)


class _TargetSearch:
    """The search on one target."""

    def __init__(self, target: Access, plan: CapacityPlan, corpus: Corpus, console: Console) -> None:
        self._target, self._plan, self._corpus, self._console = target, plan, corpus, console
        self._search = Search(plan.least, plan.most, plan.rounds)
        self._findings = Findings(target.running or TargetSpec(target.name, ""))

    async def run(self, *, first: bool) -> Findings:
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
            findings.failures.append(Failure(f"the search: {self._target.name}", type(error).__name__, str(error)))
        if first and findings.interrupted and not findings.probes:
            raise asyncio.CancelledError
        return findings

    async def _search_on(self, host: Host) -> None:
        findings, search = self._findings, self._search
        while (agents := search.next()) is not None:
            findings.spec = await host.reach(findings.probes[-1] if findings.probes else None)
            done = await self._probe(agents)
            search.add(agents, done.held)
            findings.probes.append(done)
            findings.held, findings.failed = search.held, search.failed
            word = "held" if done.held else "failed"
            line = f"{self._target.name}: {_agents(agents)} {word}: {done.why}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        findings.complete = True

    async def _probe(self, agents: int) -> Probe:
        findings, work = self._findings, plan_probe(self._plan, agents, self._corpus)
        shown = f"{self._target.name}, probe {len(findings.probes) + 1}, {_agents(agents)} ({findings.so_far})"
        with watching(self._console, work.trace, repeats=1) as view:
            watched = view.begin(shown, 0)
            watched.says = WARMS_UP
            turn = self._search.round_of(agents)
            return await probe(findings.spec, self._plan, work, agents, turn, watched.changed)


def _agents(agents: int) -> str:
    return f"{agents:,} {'agent' if agents == 1 else 'agents'}"


def _report(found: Sequence[Findings], plan: CapacityPlan, corpus: Corpus) -> Report:
    within_s = plan.arrive_within_s * plan.load.time_scale
    border = "" if plan.rounds == 1 else f", and at the border until the majority of {plan.rounds} rounds is certain"
    runs = {f"{one.spec.name}, {probe.agents} agents": [probe.run] for one in found for probe in one.probes}
    return Report(
        experiment="capacity",
        title="Capacity: agents that a server holds within limits",
        lead=(
            f"{plan.least:,} to {plan.most:,} agents, {agent_in_words(plan.load)} All arrive within {within_s:.3g} s "
            f"on average ({arrivals_in_words(plan.load)}), so that they are there together.",
            f"Each number of agents is probed once{border}. Real text ({corpus.name}).",
        ),
        plan=asdict(plan),
        figures=tuple(exact("agents held", "", one.held, by={"target": one.spec.name}) for one in found),
        tables=(
            _held_table(found, plan),
            Table("Probes", list(_probe_rows(found)), PROBE_NOTE),
            Table(CURVES, list(_curve_rows(found)), shown=False),
            *(table for table in raw_tables(runs) if table.title == "turns"),
        ),
        charts=tuple(
            Chart(name, CAPTION, "lines", CURVES, "agents", "value", "target", where, "agents", unit, levels=levels)
            for name, what, limit, unit in (
                ("P95 of resumed first tokens", TTFT, plan.slo_ttft_s, "seconds"),
                ("P95 of time per token", TPOT, plan.slo_tpot_s, "seconds"),
                ("Tokens a second of an agent", RATE, 1 / plan.slo_tpot_s, "tokens/s"),
            )
            for where, levels in (({"figure": what}, {"limit": limit}),)
        ),
        servers=tuple(Server.of(one.spec) for one in found),
        texts=Texts.of(corpus),
        failures=tuple(failure for one in found for failure in one.failures),
        interrupted=any(one.interrupted for one in found),
        has_failed=any(one.held is None or not one.complete for one in found),
    )


PROBE_NOTE = (
    "In order of time. A probe that can only fail ends early: its figures are of the turns until then. Of fewer than "
    "20 turns, p95 is nearly the greatest."
)


def _held_table(found: Sequence[Findings], plan: CapacityPlan) -> Table:
    """For each target the number of agents that it holds, the first that failed, and why."""
    rows = []
    for one in found:
        last = next((each for each in reversed(one.probes) if each.agents == one.failed and not each.held), None)
        why = None if last is None else last.why
        rows.append({"target": one.spec.name, "agents held": one.shown, "first that failed": one.failed, "why": why})
    note = (
        f"p95 of resumed first tokens at most {plan.slo_ttft_s:g} s, p95 of time per token at most {plan.slo_tpot_s:g} "
        f"s, no errors. Searched from {plan.least:,} to {plan.most:,} agents."
    )
    return Table("Agents held", rows, note)


def _probe_rows(found: Sequence[Findings]) -> Iterator[Row]:
    for one in found:
        for each in one.probes:
            summary = each.summary
            ttft, tpot = summary.ttft_resumed_s, summary.tpot_s
            yield {
                "target": one.spec.name,
                "agents": each.agents,
                "verdict": each.verdict,
                "resumed TTFT p50, ms": None if ttft is None else milliseconds(ttft.p50),
                "p95, ms": None if ttft is None else milliseconds(ttft.p95),
                "per token p50, ms": None if tpot is None else milliseconds(tpot.p50),
                "per token p95, ms": None if tpot is None else milliseconds(tpot.p95),
                "tokens/s": summary.tokens_per_s,
                "tokens/s of an agent": None if tpot is None or not tpot.p50 else 1 / tpot.p50,
                "prompt tokens cached, %": summary.cached_percent,
                "tokens recomputed": summary.recomputed_tokens,
                "turns": f"{summary.turns_completed:,} of {summary.turns_planned:,}",
                "errors": counts({**summary.turn_errors, **summary.other_errors}).removesuffix("none"),
                "at once": summary.peak_agents,
                "duration": duration(summary.duration_s),
            }


def _curve_rows(found: Sequence[Findings]) -> Iterator[Row]:
    """Seconds of p95 of both figures, and tokens a second of an agent: by target and number of agents."""
    for one in found:
        rounds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for each in one.probes:
            ttft, tpot = each.summary.ttft_resumed_s, each.summary.tpot_s
            if ttft is not None:
                rounds[TTFT, each.agents].append(ttft.p95)
            if tpot is not None:
                rounds[TPOT, each.agents].append(tpot.p95)
            if tpot is not None and tpot.p50:
                rounds[RATE, each.agents].append(1 / tpot.p50)
        for (what, agents), values in sorted(rounds.items()):
            yield {"target": one.spec.name, "figure": what, "agents": agents, "value": median(values)}
