"""How long it takes to be back where a session was: recomputed, brought back by hand, and brought back by Djinn.

A session is paused between two layers and leaves the device. Each way back is timed in turn, from outside, until the
model stands there again with all KV in place, and until the next token.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from loadgen.experiments.each_subject import on_each_subject
from loadgen.experiments.resume_latency.findings import Findings, Way
from loadgen.experiments.resume_latency.measuring import Prepared, measure, prepare
from loadgen.experiments.resume_latency.plan import ResumePlan, choose_layers, plan_cells
from loadgen.experiments.resume_latency.report import ResumeReport, TargetReport, judge
from loadgen.experiments.resume_latency.summary import summarize
from loadgen.load.corpus import Corpus
from loadgen.results.failures import ending_early, noting
from loadgen.results.inputs import Server, Texts
from loadgen.results.progress import show_parts
from loadgen.targets import TargetSpec


async def run_resume_latency(
    specs: Sequence[TargetSpec], plan: ResumePlan, model: Path | None, corpus: Corpus, console: Console
) -> ResumeReport:
    """Run the experiment on every target. Raises `LoadgenError`, before the first run, if one cannot serve it.

    With `model`, a folder, the hand-written offload goes on to the next token. Cancelled during a run, it returns what
    was seen until then.
    """
    targets = await on_each_subject(
        specs,
        lambda subject: prepare(subject, plan),
        lambda prepared: _measure(prepared, plan, model, corpus, console),
    )
    name = None if model is None else model.name
    return ResumeReport(seed=plan.seed, plan=plan, model=name, texts=Texts.of(corpus), targets=targets)


async def _measure(
    prepared: Prepared, plan: ResumePlan, model: Path | None, corpus: Corpus, console: Console
) -> TargetReport:
    subject = prepared.subject
    findings, layers = Findings(), choose_layers(subject.num_layers, plan.depths)
    per_length = plan.repeats * len(layers) * len(Way)
    parts = {length: f"{length:,} tokens" for length in plan.lengths}
    with (
        show_parts(console, subject.spec.name, dict.fromkeys(parts.values(), per_length)) as advance,
        ending_early(findings),
        noting("the run", findings.failures),
    ):
        await measure(prepared, plan, model, corpus, findings, lambda length: advance(parts[length]))
    cells = plan_cells(plan.lengths, layers)
    summary = summarize(findings, cells, subject.num_layers)
    verdicts = judge(summary, findings, per_length * len(plan.lengths), subject.num_layers)
    return TargetReport(Server.of(subject.spec), subject.num_layers, layers, findings, summary, verdicts)
