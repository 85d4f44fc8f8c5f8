"""`loadgen migrate` and `loadgen oversubscribe`: sessions that leave their server or its device, with a tiny model."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli import main
from loadgen.experiments.migrate.report import MigrateReport
from loadgen.experiments.oversubscribe.plan import OversubscribePlan
from loadgen.experiments.oversubscribe.report import OversubscribeReport
from tests.loadgen.experiments.running import raw_result, result, sessions_on
from tests.serving import serve

LENGTHS, REPEATS, NEW, DECODED = (32, 100), 2, 5, 12
MIGRATE = f"--lengths 32,100 --repeats {REPEATS} --new-tokens {NEW} --decoded {DECODED} --seed 3".split()


def migrate(output: Path, *urls: str) -> int:
    targets = [f"--target={name}={url}" for name, url in zip("ABC", urls, strict=False)]
    return main(["migrate", *MIGRATE, "--output", str(output), *targets])


def test_every_session_says_what_it_would_have_said_where_it_was(url: str, tmp_path: Path) -> None:
    """Only what is new is computed after a move, and the last token before it: its KV was not there yet.

    The second run finds what the first has left on the servers. With its disk, `goal` takes KV along.
    """
    with serve(state_dir=tmp_path / "state", kv_disk=16 << 20) as goal:
        migrate(tmp_path / "first", url, goal)
        assert migrate(tmp_path / "out", url, goal) == 0
        assert sessions_on(url) == sessions_on(goal) == []
    found = raw_result(tmp_path / "out", MigrateReport, "What they said after the move")
    assert found["findings"]["failures"] == []
    journeys = found["findings"]["journeys"]
    assert [(each["tokens"], each["repeat"]) for each in journeys] == [*product(LENGTHS, range(REPEATS))]
    for journey in journeys:
        assert journey["moved"]["token_ids"] == journey["stayed"]["token_ids"]
        assert len(journey["moved"]["token_ids"]) == DECODED
        assert journey["moved"]["computed_tokens"] == journey["stayed"]["computed_tokens"] == NEW + 1
        assert journey["anew"]["computed_tokens"] == journey["tokens"] + NEW
    for cost in found["costs"]:
        assert (cost["moves"], cost["equal"], cost["same_tokens"]) == (REPEATS, REPEATS, REPEATS * DECODED)


@pytest.mark.long
@pytest.mark.parametrize(("settings", "says"), [({"seed": 1}, "model"), ({"block_size": 8}, "KV blocks")])
def test_a_server_that_refuses_is_reported(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], says: str
) -> None:
    with serve(**settings) as other:
        assert migrate(tmp_path / "out", url, other) == 1
    assert sessions_on(url) == []
    found = result(tmp_path / "out", MigrateReport)
    failures = [(failure.part, failure.kind) for failure in found.findings.failures]
    assert failures == [("32 tokens", "Unprocessable"), ("100 tokens", "Unprocessable")]
    assert says in found.findings.failures[0].message
    assert "Unprocessable" in capsys.readouterr().out


# `loadgen oversubscribe`: sessions that outgrow the device.


@pytest.mark.parametrize(("context", "turns", "tokens"), [(1024, 4, 16), (100, 3, 7)])
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


def test_all_turns_complete_and_sessions_say_alone_what_they_said_in_the_crowd(tmp_path: Path) -> None:
    """Demand grows to four devices, while the device stays within its own."""
    with serve(kv_device=DEVICE) as url:
        assert oversubscribe(tmp_path, "--target", f"djinn={url}") == 0
        assert sessions_on(url) == []
    raw_result(tmp_path, OversubscribeReport, "all histories")
    (target,) = result(tmp_path, OversubscribeReport).targets
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


@pytest.mark.long
@pytest.mark.parametrize("tiers", [{"kv_host": f"3x{CONTEXT}", "kv_disk": 64 << 20}, {"kv_policy": "none"}])
def test_past_the_host_sessions_go_to_disk_and_without_lower_tiers_are_recomputed(
    tiers: dict[str, Any], tmp_path: Path
) -> None:
    with serve(kv_device=DEVICE, state_dir=tmp_path / "state", **tiers) as url:
        assert oversubscribe(tmp_path, "--target", f"djinn={url}") == 0
    summary = result(tmp_path, OversubscribeReport).targets[0].summary
    assert (summary.disk_bytes > 0, summary.recomputed_tokens > 0) == ("kv_disk" in tiers, "kv_disk" not in tiers)
    assert summary.matching_tokens == 3 * TURNS * TOKENS
