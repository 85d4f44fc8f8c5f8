"""Whether sessions can be stopped between layers, what it costs, and what others notice.

Everything is measured from outside, on a running server: tokens with pauses in every pass against tokens without,
round trips, steering, throughput beside a paused session, and the server's memory before, during and after.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from loadgen.errors import LoadgenError
from loadgen.experiments.each_subject import on_each_subject
from loadgen.experiments.whitebox.accuracy import run_trials
from loadgen.experiments.whitebox.bench import Bench
from loadgen.experiments.whitebox.concurrency import measure_windows
from loadgen.experiments.whitebox.plan import WhiteboxPlan, choose_layers
from loadgen.experiments.whitebox.report import TargetReport, WhiteboxReport, judge
from loadgen.experiments.whitebox.steering import measure_rates, run_steered
from loadgen.experiments.whitebox.summary import summarize
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import cut_prompts, fingerprint
from loadgen.load.workload import Workload, plan_trace
from loadgen.results.failures import ending_early, noting
from loadgen.results.inputs import Server, Texts
from loadgen.results.progress import show_parts
from loadgen.targets import TargetSpec
from loadgen.targets.histogram import between
from loadgen.targets.subject import Subject


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the experiment: how many steps it has, and what runs it, telling of each step."""

    name: str
    steps: int
    run: Callable[[Bench, Callable[[], None]], Awaitable[None]]


async def run_whitebox(
    specs: Sequence[TargetSpec], plan: WhiteboxPlan, corpus: Corpus, console: Console
) -> WhiteboxReport:
    """Run the experiment on every target. Raises `LoadgenError`, before the first run, if a target cannot serve it.

    Cancelled during a run, it returns what was seen until then.
    """
    targets = await on_each_subject(
        specs, lambda subject: _prepare(subject, plan, corpus), lambda bench: _measure(bench, console)
    )
    return WhiteboxReport(seed=plan.seed, plan=plan, texts=Texts.of(corpus), targets=targets)


async def _prepare(subject: Subject, plan: WhiteboxPlan, corpus: Corpus) -> Bench:
    """Choose layers, cut prompts, and run one turn too many: what is slow only once stays out of the measurement."""
    await subject.prepare(plan.context + plan.tokens)
    num_layers = subject.num_layers
    layers = plan.layers or choose_layers(num_layers)
    if max(layers) >= num_layers:
        raise LoadgenError(f"layers must be from 0 to {num_layers - 1} for target {subject.spec.name}")
    count = plan.prompts(len(layers)) + 1
    load = Workload(count, context=plan.context, turns=1, system_tokens=0, seed=plan.seed)
    cut = await cut_prompts(plan_trace(load), load, corpus, subject.tokenize)
    *prompts, spare = (turns[0] for turns in cut)
    await subject.answer(spare, plan.tokens)
    return Bench(subject, plan, layers, tuple(prompts))


def _parts(bench: Bench) -> list[Part]:
    """What is done, in this order."""
    plan = bench.plan
    answers = len(bench.layers) * plan.sequences
    return [
        Part("token accuracy", answers, run_trials),
        Part("steering", answers, run_steered),
        Part("decode rate", plan.sequences, measure_rates),
        Part("throughput of the others", 2 * plan.repeats, measure_windows),
    ]


async def _measure(bench: Bench, console: Console) -> TargetReport:
    findings, parts = bench.findings, _parts(bench)
    with (
        show_parts(console, bench.subject.spec.name, {part.name: part.steps for part in parts}) as advance,
        ending_early(findings),
        noting("the server's own figures", findings.failures),
    ):
        await _observe(bench, parts, advance)
    summary = summarize(findings)
    prompts = fingerprint([[prompt] for prompt in bench.prompts])
    server = Server.of(bench.subject.spec)
    return TargetReport(server, bench.layers, prompts, findings, summary, tuple(judge(summary, findings)))


async def _observe(bench: Bench, parts: Sequence[Part], advance: Callable[[str], None]) -> None:
    """Run the parts between two looks at the server; one that fails does not keep the next from running."""
    subject, findings = bench.subject, bench.findings
    findings.memory["before"], earlier = await subject.memory(), await subject.histograms()
    try:
        for part in parts:
            with noting(part.name, findings.failures):
                await part.run(bench, partial(advance, part.name))
    finally:
        findings.memory["after"], later = await subject.memory(), await subject.histograms()
        findings.histograms = {name: between(earlier[name], found) for name, found in later.items()}
