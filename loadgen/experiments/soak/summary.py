"""From what was seen to figures, and the targets that they are held against."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.experiments.soak.findings import Findings, Sample
from loadgen.experiments.soak.plan import SoakPlan
from loadgen.results.text import in_bytes
from loadgen.results.verdicts import Verdict, verdict

WARM_S = 600.0
"""Until then memory may grow: caches fill."""
SHORTEST_S = 720.0
"""Shorter runs tell nothing about growth."""
FLAT = 0.02


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run comes to. `growth` is that of resident memory from minute 10 on, as a share of its mean: the slope of
    the least squares times the duration. None of too short a run. Bytes are the highest, `away_s` the longest fault.
    """

    answers: int
    tokens: int
    faults: dict[str, int]
    wrong_answers: int
    unexpected: int
    expected: int
    rss_bytes: int
    descriptors: int
    state_bytes: int
    away_s: float
    growth: float | None


def summarize(findings: Findings) -> Summary:
    """The figures of a run, complete or not."""
    names = dict.fromkeys(fault.name for fault in findings.faults)

    def highest(of: Callable[[Sample], int]) -> int:
        return max(map(of, findings.samples), default=0)

    return Summary(
        answers=findings.answers,
        tokens=findings.tokens,
        faults={name: sum(fault.name == name for fault in findings.faults) for name in names},
        wrong_answers=len(findings.wrong),
        unexpected=len(findings.unexpected),
        expected=sum(findings.expected.values()),
        rss_bytes=highest(lambda sample: sample.rss_bytes),
        descriptors=highest(lambda sample: sample.descriptors),
        state_bytes=highest(lambda sample: sample.state_bytes),
        away_s=max((fault.ended_s - fault.began_s for fault in findings.faults), default=0.0),
        growth=growth(undisturbed(findings)) if findings.duration_s >= SHORTEST_S else None,
    )


def undisturbed(findings: Findings) -> list[tuple[float, float]]:
    """Seconds and bytes of resident memory, without the samples that were taken while a fault lasted: there may have
    been no engine.
    """
    return [
        (sample.at_s, float(sample.rss_bytes))
        for sample in findings.samples
        if sample.at_s >= WARM_S and not any(one.began_s <= sample.at_s <= one.ended_s for one in findings.faults)
    ]


def growth(points: Sequence[tuple[float, float]]) -> float | None:
    """How much the line of least squares rises from the first to the last, as a share of the mean; None of fewer than
    two points.
    """
    if len(points) < 2:
        return None
    times, values = [at_s for at_s, _ in points], [value for _, value in points]
    slope = statistics.linear_regression(times, values).slope
    return slope * (times[-1] - times[0]) / statistics.fmean(values)


def judge(summary: Summary, findings: Findings, plan: SoakPlan) -> tuple[Verdict, ...]:
    """Every target, in the order of the report."""
    rise, minutes = summary.growth, SHORTEST_S / 60
    flat = f"not told by a run of under {minutes:.0f} minutes" if rise is None else f"{rise:+.1%}"
    most = f"at most {in_bytes(summary.rss_bytes)}" if summary.rss_bytes else "no sample"
    done = sum(summary.faults.values())
    return (
        verdict("answers compared with the twin's", "some", f"{summary.answers:,}", summary.answers > 0),
        verdict("wrong answers", "none", f"{summary.wrong_answers:,}", not summary.wrong_answers),
        verdict("errors that no fault explains", "none", f"{summary.unexpected:,}", not summary.unexpected),
        verdict("faults", "some, unless the run is short", f"{done}", done > 0 or plan.seconds < 2 * plan.every),
        verdict(
            "growth of resident memory from minute 10 on",
            f"within {FLAT:.0%}",
            f"{flat}, {most}",
            None if rise is None else abs(rise) <= FLAT,
        ),
    )
