"""What it costs to run a model that is several times larger than the memory for its weights.

Djinn streams them through that memory at every pass. It is compared with itself without a budget, with a hand-written
double buffer, with the offload of others, and with copies of the same bytes without computing. A sweep tells
how large Djinn's copies should be.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from rich.console import Console

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.experiments.weights.chunks import choose, chunk_rows, measure_chunks
from loadgen.experiments.weights.findings import Findings, Way
from loadgen.experiments.weights.measuring import Bench, measure
from loadgen.experiments.weights.plan import WeightsPlan, ways_of
from loadgen.experiments.weights.programs import PROGRAMS
from loadgen.experiments.weights.report import Model, WeightsReport, judge
from loadgen.experiments.weights.setup import Setup
from loadgen.experiments.weights.summary import summarize
from loadgen.load.corpus import Corpus
from loadgen.results.failures import ending_early, noting
from loadgen.results.inputs import Server, Texts
from loadgen.results.progress import show_parts
from loadgen.targets import TargetSpec
from loadgen.targets.subject import Subject

RUN, SIZES = "the run", "sizes of copies"


async def run_weights(
    specs: Sequence[TargetSpec],
    setup: Setup,
    plan: WeightsPlan,
    corpus: Corpus,
    console: Console,
) -> WeightsReport:
    """Compare. `specs` are the servers of `Setup.servers`; the programs run beside them.

    Raises `LoadgenError`, before the first sample, if a server cannot be measured. Cancelled during the run, it returns
    what was seen until then.
    """
    findings = Findings()
    ways = [Way.STREAMED, Way.RESIDENT, *PROGRAMS, Way.PLAIN]
    steps = {str(cell): plan.repeats * len(ways_of(cell, ways)) for cell in plan.cells}
    async with _subjects(specs, plan) as (streamed, resident):
        bench = Bench(setup, plan, corpus, streamed, resident)
        with show_parts(console, "weights", steps) as advance, ending_early(findings), noting(RUN, findings.failures):
            await measure(bench, findings, lambda cell: advance(str(cell)))
    report = _report(specs, setup, plan, corpus, findings)
    return replace(report, verdicts=judge(report.summary, findings, plan.cells))


async def run_sweep(
    specs: Sequence[TargetSpec], setup: Setup, plan: WeightsPlan, corpus: Corpus, console: Console
) -> WeightsReport:
    """Find the size of copies; `specs` are the servers of `Setup.chunked_servers`. Raises as `run_weights` does."""
    findings = Findings()
    async with _subjects(specs, plan) as subjects:
        by_size = dict(zip(plan.chunks, subjects, strict=True))
        steps = {SIZES: plan.repeats * len(plan.chunks)}
        with show_parts(console, "weights", steps) as advance, ending_early(findings), noting(RUN, findings.failures):
            await measure_chunks(by_size, setup, plan, corpus, findings, lambda: advance(SIZES))
    return _report(specs, setup, plan, corpus, findings)


@asynccontextmanager
async def _subjects(specs: Sequence[TargetSpec], plan: WeightsPlan) -> AsyncIterator[list[Subject]]:
    """The servers, which have answered. Raises `LoadgenError`."""
    async with AsyncExitStack() as stack:
        subjects = [Subject(spec) for spec in specs]
        for subject in subjects:
            stack.push_async_callback(subject.close)
            try:
                await subject.prepare(plan.prompt + plan.tokens)
            except DjinnError as error:
                raise LoadgenError(f"measuring target {subject.spec.name} failed: {error}") from error
        yield subjects


def _report(
    specs: Sequence[TargetSpec], setup: Setup, plan: WeightsPlan, corpus: Corpus, findings: Findings
) -> WeightsReport:
    summary, chunks = summarize(findings, plan.cells), chunk_rows(findings.chunks)
    settings = setup.settings
    return WeightsReport(
        seed=plan.seed,
        plan=plan,
        texts=Texts.of(corpus),
        model=Model(settings.model.name, settings.dtype, setup.model_bytes, setup.budget),
        servers=tuple(Server.of(spec) for spec in specs),
        findings=findings,
        summary=summary,
        chunks=chunks,
        choice=choose(chunks),
        verdicts=(),
    )
