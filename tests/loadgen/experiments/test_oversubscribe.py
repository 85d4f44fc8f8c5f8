"""`loadgen oversubscribe`: sessions that outgrow the device, made by hand and on real servers with a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.experiments.oversubscribe.findings import Budget, Check, Findings, GrownTurn, MemorySample, TurnFailure
from loadgen.experiments.oversubscribe.plan import OversubscribePlan
from loadgen.experiments.oversubscribe.report import OversubscribeReport, judge
from loadgen.experiments.oversubscribe.summary import summarize
from loadgen.results.verdicts import Outcome
from tests.loadgen.experiments.running import raw_result, result, sessions_on
from tests.serving import serve

BUDGET = Budget(
    device_bytes=1 << 20, host_bytes=8 << 20, disk_bytes=0, block_bytes=1 << 16, block_tokens=16, policy="signal"
)


def seen(at_s: float, demand: float, device: float, host: float = 0.0) -> MemorySample:
    """A look at a server, in MiB."""
    return MemorySample(at_s, int(demand * 2**20), int(device * 2**20), int(host * 2**20), 0, 1, 0)


def turn(session: int, number: int, *, recomputed: int = 0) -> GrownTurn:
    """A turn of two tokens that took half a second."""
    return GrownTurn(session, number, number + 0.1 * session, 0.5, 20 * (number + 1), 20 * number, recomputed, (1, 2))


def everything() -> Findings:
    """Two sessions of two turns, three times as much as the device holds: every target is met."""
    return Findings(
        budget=BUDGET,
        duration_s=2.0,
        samples=[seen(0.0, 0.0, 0.0), seen(0.5, 0.5, 0.5), seen(1.0, 2.0, 0.9, 1.2), seen(1.5, 3.0, 1.0, 2.9)],
        turns=[turn(session, number) for number in range(2) for session in range(2)],
        checks=[Check(0, (1, 2, 1, 2), (1, 2, 1, 2))],
    )


@pytest.mark.parametrize(("context", "turns", "tokens"), [(1024, 4, 16), (100, 3, 7), (6, 3, 1)])
def test_the_last_turn_ends_at_the_context(context: int, turns: int, tokens: int) -> None:
    plan = OversubscribePlan(context=context, turns=turns, tokens=tokens)
    assert sum(plan.new_tokens) + turns * tokens == context
    assert max(plan.new_tokens) - min(plan.new_tokens) <= 1
    assert [len(agent.turns) for agent in plan.trace] == plan.sessions * [turns]


PLAN = OversubscribePlan(sessions=2, context=44, turns=2, tokens=2)


def outcomes(findings: Findings) -> dict[str, Outcome]:
    return {verdict.what: verdict.outcome for verdict in judge(summarize(findings, PLAN), findings)}


def test_every_target_is_met() -> None:
    assert outcomes(Findings()) == {"turns completed": Outcome.MISSED}
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


SESSIONS, CONTEXT, TURNS, TOKENS = 8, 96, 3, 4
DEVICE = f"2x{CONTEXT}"
LOAD = f"--sessions {SESSIONS} --context {CONTEXT} --turns {TURNS} --tokens {TOKENS} --checked 3 --seed 3".split()


def oversubscribe(output: Path, *arguments: str) -> int:
    return main(["oversubscribe", *LOAD, "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose device holds a quarter of what the sessions grow to."""
    with serve(kv_device=DEVICE) as url:
        yield url


@pytest.fixture(scope="module")
def measured(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert oversubscribe(folder, "--target", f"djinn={url}") == 0
    return folder


def test_all_turns_complete_and_sessions_say_alone_what_they_said_in_the_crowd(measured: Path, url: str) -> None:
    """Demand grows to four devices, while the device stays within its own."""
    raw_result(measured, OversubscribeReport, "all histories")
    (target,) = result(measured, OversubscribeReport).targets
    findings, budget = target.findings, target.findings.budget
    assert findings.failures == []
    assert {(turn.session, turn.turn) for turn in findings.turns} == set(product(range(SESSIONS), range(TURNS)))
    assert all(len(turn.token_ids) == TOKENS for turn in findings.turns)
    assert target.summary.recomputed_tokens == 0
    assert budget is not None
    demands = [sample.demand_bytes for sample in findings.samples]
    assert demands == sorted(demands)
    assert demands[-1] == 4 * budget.device_bytes
    assert all(sample.device_bytes <= budget.device_bytes for sample in findings.samples)
    assert findings.samples[-1].host_bytes > 2 * budget.device_bytes
    assert [check.session for check in findings.checks] == [0, 2, 5]
    assert all(check.crowded == check.alone and len(check.alone) == TURNS * TOKENS for check in findings.checks)
    assert sessions_on(url) == []


@pytest.mark.long
def test_past_the_host_sessions_go_to_disk(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serve(kv_device=DEVICE, kv_host=f"3x{CONTEXT}", kv_disk=64 << 20, state_dir=state) as url:
        assert oversubscribe(tmp_path, "--target", f"djinn={url}") == 0
    summary = result(tmp_path, OversubscribeReport).targets[0].summary
    assert summary.disk_bytes > 0 == summary.recomputed_tokens
    assert summary.matching_tokens == 3 * TURNS * TOKENS


@pytest.mark.long
def test_without_lower_tiers_tokens_are_computed_again_and_are_the_same(tmp_path: Path) -> None:
    with serve(kv_device=DEVICE, kv_policy="none") as url:
        assert oversubscribe(tmp_path, "--target", f"djinn={url}") == 0
    summary = result(tmp_path, OversubscribeReport).targets[0].summary
    assert summary.recomputed_tokens > 0
    assert summary.matching_tokens == 3 * TURNS * TOKENS


@pytest.mark.long
def test_a_server_that_refuses_sessions_is_shown_with_its_error(tmp_path: Path) -> None:
    with serve(kv_device=DEVICE, max_sessions=6) as url:
        assert oversubscribe(tmp_path, "--target", f"djinn={url}", "--checked", "1") == 1
    summary = result(tmp_path, OversubscribeReport).targets[0].summary
    assert summary.errors == {"RateLimited": 2}
    assert (summary.turns_completed, summary.turns_failed, summary.turns_not_run) == (18, 2, 4)
