"""What made-up findings come to."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.experiments.soak.findings import Findings, Unexpected, WrongAnswer
from loadgen.experiments.soak.plan import SoakPlan
from loadgen.experiments.soak.summary import growth, judge, summarize
from loadgen.results.verdicts import Outcome
from tests.loadgen.experiments.soak.building import calm, samples

PLAN = SoakPlan()
LOST = Unexpected("agent-1", 5.0, "turn", "ServerError", 500, "internal_error", "a bug", "request-1")
WRONG = WrongAnswer("agent-1", 5.0, 3, (1, 2), (1, 3))


def outcomes(findings: Findings) -> dict[str, Outcome]:
    return {one.what: one.outcome for one in judge(summarize(findings), findings, PLAN)}


def test_a_calm_hour_meets_every_target() -> None:
    assert set(outcomes(calm()).values()) == {Outcome.MET}


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("answers compared with the twin's", {"answers": 0}),
        ("wrong answers", {"wrong": [WRONG]}),
        ("errors that no fault explains", {"unexpected": [LOST]}),
        ("faults", {"faults": []}),
    ],
)
def test_each_target_can_be_missed(what: str, changed: dict[str, Any]) -> None:
    findings = calm()
    for name, value in changed.items():
        setattr(findings, name, value)
    assert {name for name, outcome in outcomes(findings).items() if outcome is not Outcome.MET} == {what}


@pytest.mark.parametrize(
    ("first", "last", "outcome"),
    [(1000, 1010, Outcome.MET), (1000, 1030, Outcome.MISSED), (1030, 1000, Outcome.MISSED)],
)
def test_memory_must_be_flat_from_minute_10_on(first: int, last: int, outcome: Outcome) -> None:
    findings, step = calm(), (last - first) / 300
    warming = [(float(second), 10 * second) for second in range(0, 600, 10)]
    later = [(600.0 + 10 * number, round(1e6 * (first + step * number))) for number in range(301)]
    findings.samples = samples([*warming, *later])
    assert outcomes(findings)["growth of resident memory from minute 10 on"] is outcome


def test_samples_during_a_fault_do_not_count() -> None:
    findings = calm()
    findings.samples = samples((one.at_s, 1 if 1000 <= one.at_s <= 1005 else 1 << 30) for one in calm().samples)
    assert summarize(findings).growth == pytest.approx(0)


def test_a_short_run_tells_nothing_of_growth() -> None:
    findings = calm()
    findings.duration_s = 700.0
    assert outcomes(findings)["growth of resident memory from minute 10 on"] is Outcome.UNKNOWN


def test_growth_is_the_rise_of_the_line_over_the_mean() -> None:
    assert growth([(0.0, 90.0), (5.0, 100.0), (10.0, 110.0)]) == pytest.approx(0.2)
    assert growth([(0.0, 90.0)]) is None
