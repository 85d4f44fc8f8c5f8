"""`loadgen whitebox`: what follows from findings made by hand, and the experiment on a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.cli import main
from loadgen.experiments.whitebox.findings import Arm, Findings, Rates, RoundTrip, Saved, Steered, Trial, Waited, Window
from loadgen.experiments.whitebox.plan import choose_layers
from loadgen.experiments.whitebox.report import WhiteboxReport, judge
from loadgen.experiments.whitebox.steering import first_difference
from loadgen.experiments.whitebox.summary import Ratio, pair_windows, summarize
from loadgen.results.verdicts import Outcome
from loadgen.targets.histogram import Bucket
from loadgen.targets.subject import HISTOGRAMS
from tests.loadgen.experiments.running import raw_result, result, sessions_on
from tests.loadgen.recording import memory
from tests.serving import serve

RESTORE, DISPATCH = "djinn_checkpoint_restore_seconds", "djinn_resume_dispatch_seconds"


def histogram(*counts: int) -> list[Bucket]:
    """So many observations up to 0.1, 1 and 10 ms, and beyond."""
    uppers = (1e-4, 1e-3, 1e-2, float("inf"))
    return [Bucket(upper, sum(counts[: place + 1])) for place, upper in enumerate(uppers)]


def everything() -> Findings:
    """A run in which every target is met."""
    return Findings(
        trials=[Trial(layer, 0, (1, 2, 3), (1, 2, 3), 1, 2) for layer in (3, 6)],
        round_trips=[
            RoundTrip(Waited.RESUME, 64, 0.2),
            RoundTrip(Waited.RESUME, 1, 0.03),
            RoundTrip(Waited.TOKEN, 1, 0.02),
            RoundTrip(Waited.READ, 64, 0.004),
            RoundTrip(Waited.WRITE, 64, 0.005),
        ],
        saved=[Saved(64, 1 << 16, 2e-5), Saved(1, 1 << 10, 1e-5)],
        steered=[Steered(3, 0, 1), Steered(3, 1, None), Steered(6, 0, 0)],
        rates=[Rates({Arm.PLAIN: 100.0, Arm.UNMATCHED: 99.5, Arm.STEERED: 80.0})],
        windows=[Window(0, False, (100, 100), 100.0), Window(0, True, (99, 100), 99.5)],
        memory={"before": memory(), "during": memory(4096, 256, 1), "after": memory()},
        histograms={
            "djinn_checkpoint_save_seconds": histogram(2, 0, 0, 0),
            RESTORE: histogram(0, 2, 0, 0),
            DISPATCH: histogram(2, 0, 0, 0),
        },
    )


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(12, (3, 6, 9)), (32, (8, 16, 24)), (30, (7, 15, 22)), (4, (1, 2, 3)), (1, (0,))]
)
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
    windows = [
        Window(0, False, (100,), 100.0),
        Window(0, True, (50,), 100.0),
        Window(1, True, (90,), 90.0),
        Window(1, False, (100,), 100.0),
        Window(2, True, (100,), 100.0),
    ]
    assert list(pair_windows(windows)) == [1.0, 0.9]


@pytest.mark.parametrize(
    ("pairs", "first", "last"), [(3, 1, 3), (6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (15, 4, 12), (20, 6, 15)]
)
def test_the_bounds_of_a_median_are_those_of_the_tables(pairs: int, first: int, last: int) -> None:
    """As they are printed, for 95 %, in tables of the sign test; up to five pairs have none, and get all."""
    found = Ratio.of([float(number) for number in range(pairs, 0, -1)])
    assert found is not None
    assert (found.low, found.high) == (first, last)


def outcomes(findings: Findings) -> dict[str, Outcome]:
    return {verdict.what: verdict.outcome for verdict in judge(summarize(findings), findings)}


def test_all_is_met_where_all_is_well() -> None:
    assert set(outcomes(Findings()).values()) == {Outcome.UNKNOWN}
    assert set(outcomes(everything()).values()) == {Outcome.MET}


MISSES: list[tuple[str, Callable[[Findings], Findings]]] = [
    ("tokens that", lambda good: replace(good, trials=[*good.trials, Trial(9, 0, (1, 2), (1, 3), 1, 1)])),
    ("tokens that", lambda good: replace(good, trials=[*good.trials, Trial(9, 0, (1, 2), (1, 2), 1, 0)])),
    ("restored", lambda good: replace(good, histograms={RESTORE: histogram(1, 1, 3, 0)})),
    ("dispatched", lambda good: replace(good, histograms={DISPATCH: histogram(1, 2, 0, 0)})),
    ("say something else", lambda good: replace(good, steered=[*good.steered, Steered(9, 0, None)])),
    (
        "never matches",
        lambda good: replace(good, rates=[Rates({Arm.PLAIN: 100.0, Arm.UNMATCHED: 98.9, Arm.STEERED: 80.0})]),
    ),
    ("others", lambda good: replace(good, windows=[good.windows[0], Window(0, True, (95, 100), 98.9)])),
    ("as they would have", lambda good: replace(good, windows=[replace(w, undisturbed=False) for w in good.windows])),
    ("memory", lambda good: replace(good, memory={**good.memory, "after": memory(owned=1)})),
    ("memory", lambda good: replace(good, memory={**good.memory, "after": memory(checkpoint=1)})),
]


@pytest.mark.parametrize(("named", "spoil"), MISSES)
def test_one_miss_is_that_of_its_figure_alone(named: str, spoil: Callable[[Findings], Findings]) -> None:
    missed = [what for what, outcome in outcomes(spoil(everything())).items() if outcome is Outcome.MISSED]
    assert len(missed) == 1
    assert named in missed[0]


SEQUENCES, TOKENS, CONTEXT, OTHERS, REPEATS = 2, 24, 20, 3, 2
LOAD = f"""
    --sequences {SEQUENCES} --tokens {TOKENS} --context {CONTEXT} --others {OTHERS} --repeats {REPEATS}
    --pause-seconds 0.4 --scale 0.2 --seed 3
""".split()


def whitebox(output: Path, *arguments: str) -> int:
    return main(["whitebox", *LOAD, "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of this file's own, so that what is left on it was left by the load generator."""
    with serve() as url:
        yield url


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
