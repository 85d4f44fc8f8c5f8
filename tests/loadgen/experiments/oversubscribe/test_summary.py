"""Figures and verdicts of findings made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from loadgen.experiments.oversubscribe.findings import Budget, Check, Findings, TurnFailure
from loadgen.experiments.oversubscribe.plan import OversubscribePlan
from loadgen.experiments.oversubscribe.report import judge
from loadgen.experiments.oversubscribe.summary import Plateau, summarize
from loadgen.results.verdicts import Outcome
from tests.loadgen.experiments.oversubscribe.building import BUDGET, everything, seen, turn

PLAN = OversubscribePlan(sessions=2, context=44, turns=2, tokens=2)


def outcomes(findings: Findings) -> dict[str, Outcome]:
    return {verdict.what: verdict.outcome for verdict in judge(summarize(findings, PLAN), findings)}


def test_the_plateau_is_where_demand_exceeds_the_device() -> None:
    summary = summarize(everything(), PLAN)
    assert summary.plateau == Plateau(int(0.9 * 2**20), 2**20, 2)
    assert (summary.demand_bytes, summary.device_bytes) == (3 << 20, 1 << 20)
    assert (summary.turns_planned, summary.turns_completed, summary.turns_not_run) == (4, 4, 0)


def test_every_target_is_met() -> None:
    assert set(outcomes(everything()).values()) == {Outcome.MET}


def _too_small(findings: Findings) -> None:
    findings.samples = [seen(0.0, 0.5, 0.5)]


def _beyond_budget(findings: Findings) -> None:
    findings.samples.append(seen(2.0, 3.0, 1.1))


def _failed(findings: Findings) -> None:
    findings.turns.pop()
    findings.turn_failures.append(TurnFailure(1, 1, 1.0, "RateLimited", "full"))


def _lost(findings: Findings) -> None:
    findings.turns[-1] = turn(1, 1, recomputed=20)


def _other_tokens(findings: Findings) -> None:
    findings.checks.append(Check(1, (1, 2, 1, 2), (1, 2, 1, 3)))


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        (_too_small, "KV of all histories, of what the device holds"),
        (_beyond_budget, "KV on the device"),
        (_failed, "turns completed"),
        (_lost, "tokens computed again"),
        (_other_tokens, "tokens that are the same when the session is alone"),
    ],
)
def test_each_target_can_be_missed(change: Callable[[Findings], None], missed: str) -> None:
    findings = everything()
    change(findings)
    found = outcomes(findings)
    assert [what for what, outcome in found.items() if outcome is Outcome.MISSED] == [missed]


@pytest.mark.parametrize("budget", [replace(BUDGET, policy="none"), replace(BUDGET, host_bytes=1 << 20)])
def test_a_server_that_has_nowhere_to_keep_it_may_compute_again(budget: Budget) -> None:
    findings = replace(everything(), budget=budget)
    _lost(findings)
    assert outcomes(findings)["tokens computed again"] is Outcome.UNKNOWN


def test_nothing_measured_is_no_success() -> None:
    assert outcomes(Findings()) == {"turns completed": Outcome.MISSED}
    assert outcomes(Findings(budget=BUDGET))["tokens that are the same when the session is alone"] is Outcome.UNKNOWN
