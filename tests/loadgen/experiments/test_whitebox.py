"""`loadgen whitebox`: what follows from findings made by hand, and the experiment on a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.cli import main
from loadgen.experiments.whitebox.findings import Window
from loadgen.experiments.whitebox.plan import choose_layers
from loadgen.experiments.whitebox.report import WhiteboxReport
from loadgen.experiments.whitebox.steering import first_difference
from loadgen.experiments.whitebox.summary import Ratio, pair_windows
from loadgen.results.verdicts import Outcome
from loadgen.targets.subject import HISTOGRAMS
from tests.loadgen.experiments.running import raw_result, result, sessions_on
from tests.serving import serve


@pytest.mark.parametrize(("num_layers", "layers"), [(32, (8, 16, 24)), (30, (7, 15, 22)), (1, (0,))])
def test_layers_are_a_quarter_a_half_and_three_quarters_of_the_way_up(num_layers: int, layers: tuple[int, ...]) -> None:
    assert choose_layers(num_layers) == layers


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_the_first_difference_is_the_end_of_the_common_beginning(one: list[int], other: list[int]) -> None:
    place = first_difference(tuple(one), tuple(other))
    if place is None:
        assert one == other
    else:
        assert one[:place] == other[:place]
        assert one[place : place + 1] != other[place : place + 1]


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


@pytest.mark.long
def test_layers_can_be_chosen_and_a_miss_is_no_success(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steering by 1 changes nothing, and that misses its target."""
    assert whitebox(tmp_path, "--target", f"djinn={url}", "--layers", "0", "--scale", "1") == 1
    (found,) = result(tmp_path, WhiteboxReport).targets
    assert tuple(found.layers) == (0,)
    missed = {verdict.what for verdict in found.verdicts if verdict.outcome is Outcome.MISSED}
    assert "steered turns that say something else" in missed
    assert "tokens that are the same with a pause in every pass" not in missed
    assert "missed" in capsys.readouterr().out


@pytest.mark.long
def test_a_server_too_full_for_the_others_is_a_failure_of_that_part(tmp_path: Path) -> None:
    with serve(max_sessions=2) as url:
        assert whitebox(tmp_path, "--target", f"djinn={url}") == 1
    (found,) = result(tmp_path, WhiteboxReport).targets
    failures = [(failure.part, failure.kind) for failure in found.findings.failures]
    assert failures == [("throughput of the others", "RateLimited")]
    assert len(found.findings.trials) == 3 * SEQUENCES
