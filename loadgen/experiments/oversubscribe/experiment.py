"""What happens when sessions need more KV than the device holds.

Sessions grow turn by turn until their KV is several times what fits. All the while the server's memory is looked at;
afterwards some sessions are answered again, alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from loadgen.experiments.each_subject import on_each_subject
from loadgen.experiments.oversubscribe.checking import check_sessions
from loadgen.experiments.oversubscribe.findings import Findings
from loadgen.experiments.oversubscribe.growing import Crowd, Histories
from loadgen.experiments.oversubscribe.plan import OversubscribePlan
from loadgen.experiments.oversubscribe.report import OversubscribeReport, TargetReport, judge
from loadgen.experiments.oversubscribe.sampling import read_budget, sampled
from loadgen.experiments.oversubscribe.summary import summarize
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import cut_prompts, fingerprint
from loadgen.load.workload import Load
from loadgen.results.failures import ending_early, noting
from loadgen.results.inputs import Server, Texts
from loadgen.results.progress import show_parts
from loadgen.targets import TargetSpec
from loadgen.targets.subject import Subject

GROWING, CHECKING = "turns", "sessions once more"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server that has answered, and what its sessions will be sent."""

    subject: Subject
    histories: Histories


async def run_oversubscribe(
    specs: Sequence[TargetSpec], plan: OversubscribePlan, corpus: Corpus, console: Console
) -> OversubscribeReport:
    """Run the experiment on every target. Raises `LoadgenError`, before the first run, if one cannot serve it.

    Cancelled during a run, it returns what was seen until then.
    """
    targets = await on_each_subject(
        specs, lambda subject: _prepare(subject, plan, corpus), lambda prepared: _measure(prepared, plan, console)
    )
    return OversubscribeReport(seed=plan.seed, plan=plan, texts=Texts.of(corpus), targets=targets)


async def _prepare(subject: Subject, plan: OversubscribePlan, corpus: Corpus) -> Prepared:
    await subject.prepare(plan.context)
    load = Load(system_tokens=0, seed=plan.seed)
    histories = await cut_prompts(plan.trace, load, corpus, subject.tokenize)
    return Prepared(subject, histories)


async def _measure(prepared: Prepared, plan: OversubscribePlan, console: Console) -> TargetReport:
    findings, spec = Findings(), prepared.subject.spec
    steps = {GROWING: plan.sessions * plan.turns} | (
        {CHECKING: len(plan.checked_sessions)} if plan.checked_sessions else {}
    )
    with show_parts(console, spec.name, steps) as advance, ending_early(findings):
        with noting("the run", findings.failures):
            await _grow(prepared, plan, findings, partial(advance, GROWING))
        with noting(CHECKING, findings.failures):
            await check_sessions(prepared.subject, plan, prepared.histories, findings, partial(advance, CHECKING))
    summary = summarize(findings, plan)
    verdicts = judge(summary, findings)
    return TargetReport(Server.of(spec), fingerprint(prepared.histories), findings, summary, verdicts)


async def _grow(prepared: Prepared, plan: OversubscribePlan, findings: Findings, step: Callable[[], None]) -> None:
    """All turns of all sessions, and the server's memory meanwhile."""
    subject = prepared.subject
    budget = findings.budget = read_budget(await subject.memory())
    crowd = Crowd(subject, plan, prepared.histories, findings)
    try:
        async with sampled(subject, crowd, budget, findings):
            await crowd.grow(step)
    finally:
        with noting("closing the sessions", findings.failures):
            await crowd.close()
