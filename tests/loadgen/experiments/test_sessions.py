"""`loadgen whitebox`, `migrate` and `oversubscribe`: sessions that pause, move and outgrow the device."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli import main
from loadgen.experiments.migrate.report import MigrateReport
from loadgen.experiments.oversubscribe.report import OversubscribeReport
from loadgen.experiments.whitebox.findings import Window
from loadgen.experiments.whitebox.report import WhiteboxReport
from loadgen.experiments.whitebox.summary import Ratio, pair_windows
from loadgen.targets.subject import HISTOGRAMS
from tests.loadgen.experiments.conftest import raw_result, result, sessions_on
from tests.serving import serve


def test_windows_are_compared_within_each_repeat() -> None:
    speeds = ((0, False, 100.0), (0, True, 100.0), (1, True, 90.0), (1, False, 100.0), (2, True, 100.0))
    windows = [Window(repeat, paused, (100,), tokens_per_s) for repeat, paused, tokens_per_s in speeds]
    assert list(pair_windows(windows)) == [1.0, 0.9]


@pytest.mark.parametrize(("pairs", "first", "last"), [(3, 1, 3), (8, 1, 8), (9, 2, 8), (20, 6, 15)])
def test_the_bounds_of_a_median_are_those_of_the_tables(pairs: int, first: int, last: int) -> None:
    """As they are printed, for 95 %, in tables of the sign test; up to five pairs have none, and get all."""
    found = Ratio.of([float(number) for number in range(pairs, 0, -1)])
    assert found is not None
    assert (found.low, found.high) == (first, last)


SEQUENCES, TOKENS, CONTEXT, OTHERS, REPEATS = 2, 24, 20, 3, 2
LOAD = f"""
    --sequences {SEQUENCES} --tokens {TOKENS} --context {CONTEXT} --others {OTHERS} --repeats {REPEATS}
    --pause-seconds 0.4 --scale 0.2 --seed 3
""".split()


def whitebox(output: Path, *arguments: str) -> int:
    return main(["whitebox", *LOAD, "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def target(url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run. Speed is missed or met as the machine pleases, so that the exit code can be either."""
    folder = tmp_path_factory.mktemp("results")
    whitebox(folder, "--target", f"djinn={url}")
    (found,) = raw_result(folder, WhiteboxReport, "Token accuracy with a pause in every pass")["targets"]
    assert found["findings"]["failures"] == []
    assert isinstance(found, dict)
    return found


def test_every_token_is_the_same_with_a_pause_in_every_pass_and_others_decode_on(target: dict[str, Any]) -> None:
    findings = target["findings"]
    assert target["layers"] == [1, 2, 3]
    assert [(trial["layer"], trial["sequence"]) for trial in findings["trials"]] == [
        (layer, sequence) for layer in (1, 2, 3) for sequence in range(SEQUENCES)
    ]
    for trial in findings["trials"]:
        assert trial["plain"] == trial["paused"]
        assert (len(trial["plain"]), trial["prefill_pauses"], trial["decode_pauses"]) == (TOKENS, 1, TOKENS - 1)
    assert len(findings["saved"]) == 3 * SEQUENCES * TOKENS
    assert {saved["positions"] for saved in findings["saved"]} == {1, CONTEXT}
    assert len(findings["steered"]) == 3 * SEQUENCES
    assert any(turn["differs_at"] is not None for turn in findings["steered"])
    order = [(window["repeat"], window["paused"]) for window in findings["windows"]]
    assert order == [(0, False), (0, True), (1, True), (1, False)]
    assert all(window["undisturbed"] and window["tokens_per_s"] > 0 for window in findings["windows"])


def test_round_trips_the_servers_clock_and_its_memory(target: dict[str, Any], url: str) -> None:
    findings = target["findings"]
    calls = [trip["waited"] for trip in findings["round_trips"]]
    assert calls.count("resume to the next pause") == 3 * SEQUENCES * (TOKENS - 1)
    assert calls.count("read the activation") == calls.count("write it back") == 3 * SEQUENCES
    assert all(0 < trip["seconds"] < 5 for trip in findings["round_trips"])
    assert set(findings["histograms"]) == set(HISTOGRAMS)
    saves = findings["histograms"]["djinn_checkpoint_save_seconds"][-1]["count"]
    assert saves == len(findings["saved"]) + REPEATS
    before, during, after = (findings["memory"][when] for when in ("before", "during", "after"))
    assert (before["sessions"], during["sessions"], after["sessions"]) == (0, 1, 0)
    assert min(during["stack"]["checkpoint_bytes"], during["data"]["device"]["owned_bytes"]) > 0
    assert after["stack"]["checkpoint_bytes"] == after["data"]["device"]["owned_bytes"] == 0
    assert sessions_on(url) == []


# `loadgen migrate`: sessions that move.

LENGTHS, MOVES, NEW, DECODED = (32, 100), 2, 5, 12
MIGRATE = f"--lengths 32,100 --repeats {MOVES} --new-tokens {NEW} --decoded {DECODED} --seed 3".split()


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
    assert [(each["tokens"], each["repeat"]) for each in journeys] == [*product(LENGTHS, range(MOVES))]
    for journey in journeys:
        assert journey["moved"]["token_ids"] == journey["stayed"]["token_ids"]
        assert len(journey["moved"]["token_ids"]) == DECODED
        assert journey["moved"]["computed_tokens"] == journey["stayed"]["computed_tokens"] == NEW + 1
        assert journey["anew"]["computed_tokens"] == journey["tokens"] + NEW
    for cost in found["costs"]:
        assert (cost["moves"], cost["equal"], cost["same_tokens"]) == (MOVES, MOVES, MOVES * DECODED)


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

SESSIONS, LONGEST, TURNS, SAID = 8, 96, 3, 4
DEVICE = f"2x{LONGEST}"
CROWD = f"--sessions {SESSIONS} --context {LONGEST} --turns {TURNS} --tokens {SAID} --checked 3 --seed 3".split()


def oversubscribe(output: Path, *arguments: str) -> int:
    return main(["oversubscribe", *CROWD, "--output", str(output), *arguments])


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
    assert all(len(turn.token_ids) == SAID for turn in findings.turns)
    assert target.summary.recomputed_tokens == 0
    assert budget is not None
    demands = [sample.demand_bytes for sample in findings.samples]
    assert demands == sorted(demands)
    assert demands[-1] == 4 * budget.device_bytes
    assert all(sample.device_bytes <= budget.device_bytes for sample in findings.samples)
    assert findings.samples[-1].host_bytes > 2 * budget.device_bytes
    assert [check.session for check in findings.checks] == [0, 2, 5]
    assert all(check.crowded == check.alone and len(check.alone) == TURNS * SAID for check in findings.checks)


@pytest.mark.long
@pytest.mark.parametrize("tiers", [{"kv_host": f"3x{LONGEST}", "kv_disk": 64 << 20}, {"kv_policy": "none"}])
def test_past_the_host_sessions_go_to_disk_and_without_lower_tiers_are_recomputed(
    tiers: dict[str, Any], tmp_path: Path
) -> None:
    with serve(kv_device=DEVICE, state_dir=tmp_path / "state", **tiers) as url:
        assert oversubscribe(tmp_path, "--target", f"djinn={url}") == 0
    summary = result(tmp_path, OversubscribeReport).targets[0].summary
    assert (summary.disk_bytes > 0, summary.recomputed_tokens > 0) == ("kv_disk" in tiers, "kv_disk" not in tiers)
    assert summary.matching_tokens == 3 * TURNS * SAID
