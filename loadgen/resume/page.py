"""The report as a page."""

from __future__ import annotations

from loadgen.reporting.page import Page, Section
from loadgen.resume.figures import figures
from loadgen.resume.report import ResumeReport, TargetReport
from loadgen.resume.tables import tables

TIMED = (
    Section(
        "Recompute: what is timed",
        "A fresh session is sent the whole history. Stands again: from the request until the answer that it is paused "
        "after the layer. Next token: another fresh session without a pause, from the request to the first token. "
        "Neither the opening of a session nor the arming of the breakpoint is on the clock; no prefix is in a cache.",
    ),
    Section(
        "Hand-written offload: what is timed",
        "A script of its own, with one session and without HTTP. Stands again: it copies the KV that the layers up to "
        "the pause have from one buffer in host memory (pinned where there is CUDA) to one on the device, and the "
        "residual stream, until both have arrived. Next token: then Transformers takes the residual stream through the "
        "layers that are left.",
    ),
    Section(
        "Djinn: what is timed",
        "The paused session is in the host tier, and others have taken its place on the device. Stands again: from "
        "sending `ready` until the server, which is asked again and again, says that all KV is on the device; the time "
        "in which the residual stream comes back is added, by the server's clock. Next token: from sending `resume`, "
        "unannounced, to the first token. All KV that the session has comes back, in blocks of all layers.",
    ),
)


def make_page(report: ResumeReport) -> Page:
    """All that there is to see of a run."""
    plan = report.plan
    depths = ", ".join(f"{depth:g}" for depth in plan.depths)
    lead = (
        f"Sessions of {', '.join(f'{length:,}' for length in plan.lengths)} tokens of real text ({report.texts.name}), "
        f"paused at {depths} % of the layers, {plan.repeats} times in each way, in alternating order.",
        f"{report.started_at:%Y-%m-%d %H:%M} UTC, on {report.machine}.",
    )
    sections = [section for target in report.targets for section in _sections(target)]
    return Page("Coming back to where it was", lead, (*sections, *TIMED), report.command)


def _sections(target: TargetReport) -> tuple[Section, ...]:
    server, findings = target.server, target.findings
    text = [f"Started with {server.started}."] if server.started else []
    if findings.offload:
        text.append(f"The hand-written offload ran on {findings.offload}.")
    parted = {length: first for length, first in findings.passes.items() if first}
    if parted:
        shown = ", ".join(f"{first:,} of {length:,}" for length, first in parted.items())
        text.append(
            f"The server computes long histories in parts; only the last one pauses, and the positions before it "
            f"({shown} tokens) have KV of all layers in every way."
        )
    title = f"{server.name}: {server.url}"
    return (Section(title, " ".join(text), tuple(figures(target)), tuple(tables(target))),)
