"""The result file of the experiment, and the targets that its figures are held against."""

from dataclasses import dataclass
from typing import Literal

from loadgen.experiments.resume_latency.findings import Findings, Way
from loadgen.experiments.resume_latency.plan import ResumePlan, depth_of
from loadgen.experiments.resume_latency.summary import Crossing, Measure, Summary
from loadgen.results.files import Result
from loadgen.results.inputs import Server, Texts
from loadgen.results.per_target import PerTarget
from loadgen.results.verdicts import Verdict, all_well, verdict


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One target's part of a report. `num_layers` are those of its model, `layers` those that were paused after."""

    server: Server
    num_layers: int
    layers: tuple[int, ...]
    findings: Findings
    summary: Summary
    verdicts: tuple[Verdict, ...]

    @property
    def succeeded(self) -> bool:
        """Whether everything was measured, and no target is missed."""
        return all_well(self.verdicts, self.findings.failures, interrupted=self.findings.interrupted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport(PerTarget, Result):
    """One run of the experiment. `model` is the folder's name of what the hand-written offload ran, if it did."""

    experiment: Literal["resume-latency"] = "resume-latency"
    plan: ResumePlan
    model: str | None
    texts: Texts
    targets: tuple[TargetReport, ...]


def judge(summary: Summary, findings: Findings, planned: int, num_layers: int) -> tuple[Verdict, ...]:
    """Every target, in the order of the report. `planned` is how many samples there should be."""
    standing = [crossing for crossing in summary.crossings if crossing.measure is Measure.STANDING]
    return (
        *(_sooner(summary, crossing, num_layers) for crossing in standing),
        _agreement(summary),
        _complete(findings, planned),
    )


def from_layer(crossing: Crossing, num_layers: int) -> str:
    """From where on Djinn is sooner."""
    if crossing.layer is None:
        return "at no depth"
    return f"from layer {crossing.layer} on ({depth_of(crossing.layer, num_layers):.0f} % of depth)"


def _sooner(summary: Summary, crossing: Crossing, num_layers: int) -> Verdict:
    rows = [row for row in summary.rows if row.length == crossing.length]
    both = [{row.layer for row in rows if row.way is way} for way in (Way.RECOMPUTE, Way.DJINN)]
    layers = both[0] & both[1]
    met = None if not layers else crossing.layer == min(layers)
    measured = from_layer(crossing, num_layers) if layers else ""
    return verdict(f"stands again sooner than a recompute, {crossing.length:,} tokens", "all depths", measured, met)


def _agreement(summary: Summary) -> Verdict:
    """Djinn's next token and that of Transformers, which was handed the same history."""
    same = sum(each.djinn == each.transformers for each in summary.agreements)
    total = len(summary.agreements)
    return verdict(
        "next tokens that are those of Transformers", "all", f"{same} of {total}", same == total if total else None
    )


def _complete(findings: Findings, planned: int) -> Verdict:
    taken = len(findings.samples)
    return verdict(
        "samples whose KV had left the device, and of which nothing was recomputed",
        "all",
        f"{taken} of {planned}",
        taken == planned,
    )


def times(ratio: float) -> str:
    """Two figures of a ratio, or all that are before the point."""
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 10 else f"{ratio:,.0f}"
