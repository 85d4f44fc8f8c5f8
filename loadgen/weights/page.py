"""The report as a page."""

from __future__ import annotations

from loadgen.reporting.page import Page, Section
from loadgen.reporting.units import in_bytes
from loadgen.weights.figures import figures
from loadgen.weights.page_cache import PERIOD_S
from loadgen.weights.report import WeightsReport
from loadgen.weights.tables import choice_in_words, tables

TIMED = (
    Section(
        "What is timed",
        "All prompts of a batch are sent at once. First token: until the last session has its first one; opening the "
        "sessions is not on the clock. Tokens per second: from then on until one session has its last. Bandwidth: what "
        "a pass needs of the weights and the device does not keep, times passes per second in that time. The "
        "sessions of a batch share out the same number of prompt tokens, so that all batches compute as much before "
        "their first tokens. Nothing of any prompt is in a cache.",
    ),
    Section(
        "What it is compared with",
        "All have the same prompts and the same budget, and run in turn in one run; only Djinn is asked over HTTP. "
        "Plain copies: one thread reads what the double buffer streams in a pass into two buffers in turn, over and "
        "over (on CUDA: copies it from pinned memory), and does nothing else. Double buffer: a decoder written by hand "
        "for one static batch, with two buffers of which one is filled while the other is computed with; the rest of "
        "the budget keeps whole layers, evenly spread. Accelerate, DeepSpeed: Transformers' generation, their offload.",
    ),
)
COLD = Section(
    "Cold",
    f"While a cold sample is taken, all files of weights are dropped from the page cache every {PERIOD_S:g} s, so that "
    "every pass reads from the disk.",
)


def make_page(report: WeightsReport) -> Page:
    """All that there is to see of a run."""
    plan, model = report.plan, report.model
    lead = (
        f"{model.name} in {model.dtype}, {in_bytes(model.bytes.total)} of weights, of which the device may have "
        f"{in_bytes(model.budget_bytes)}: {model.bytes.total / model.budget_bytes:.1f} times less. "
        f"{plan.prompt:,} tokens of prompt in a batch ({report.texts.name}), {plan.tokens} generated for each session, "
        f"{plan.repeats} times in each way, in alternating order.",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}.",
    )
    started = " ".join(f"{server.name}: {server.started}." for server in report.servers)
    facts = " ".join(f"{fact}." for fact in report.findings.facts)
    chosen = () if report.choice is None else (Section("The size to choose", choice_in_words(report.choice)),)
    found = Section("", "", tuple(figures(report)), tuple(tables(report)))
    explained = (*TIMED, *((COLD,) if plan.cold else ()), Section("Servers and programs", f"{started} {facts}"))
    return Page("A model larger than the device", lead, (*chosen, found, *explained), report.command)
