"""`loadgen oversubscribe`: sessions that outgrow the device, made by hand and on real servers with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.experiments.oversubscribe.plan import OversubscribePlan
from loadgen.experiments.oversubscribe.report import OversubscribeReport
from tests.loadgen.experiments.running import raw_result, result, sessions_on
from tests.serving import serve


@pytest.mark.parametrize(("context", "turns", "tokens"), [(1024, 4, 16), (100, 3, 7), (6, 3, 1)])
def test_the_last_turn_ends_at_the_context(context: int, turns: int, tokens: int) -> None:
    plan = OversubscribePlan(context=context, turns=turns, tokens=tokens)
    assert sum(plan.new_tokens) + turns * tokens == context
    assert max(plan.new_tokens) - min(plan.new_tokens) <= 1
    assert [len(agent.turns) for agent in plan.trace] == plan.sessions * [turns]


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
