"""Figures follow from what was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.experiments.whitebox.findings import Arm, Findings, Trial, Window
from loadgen.experiments.whitebox.steering import first_difference
from loadgen.experiments.whitebox.summary import Ratio, pair_windows, summarize
from tests.loadgen.experiments.whitebox.building import everything, histogram


def test_accuracy_is_that_of_each_layer() -> None:
    trials = [
        Trial(6, 0, (1, 2, 3, 4), (1, 2, 9, 4), 1, 3),
        Trial(3, 0, (1, 2), (1, 2), 1, 1),
        Trial(6, 1, (5,), (5,), 2, 0),
    ]
    low, high = summarize(Findings(trials=trials)).accuracy
    assert (low.layer, low.trials, low.share) == (3, 1, 1.0)
    assert (high.layer, high.trials, high.matching, high.tokens) == (6, 2, 4, 5)
    assert (high.prefill_pauses, high.decode_pauses, high.paused_everywhere) == (3, 3, True)


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 0), (1, 2)])
def test_a_pass_without_its_pause_is_noticed(prefill: int, decode: int) -> None:
    (row,) = summarize(Findings(trials=[Trial(3, 0, (1, 2), (1, 2), prefill, decode)])).accuracy
    assert not row.paused_everywhere


def test_a_turn_that_ends_early_has_not_every_token_right() -> None:
    (row,) = summarize(Findings(trials=[Trial(3, 0, (1, 2, 3, 4), (1, 2), 1, 1)])).accuracy
    assert row.share == 0.5


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_the_first_difference_is_the_end_of_the_common_beginning(one: list[int], other: list[int]) -> None:
    place = first_difference(tuple(one), tuple(other))
    if place is None:
        assert one == other
    else:
        assert one[:place] == other[:place]
        assert one[place : place + 1] != other[place : place + 1]


def test_latency_tells_prompts_from_tokens() -> None:
    assert [(row.what, row.positions, row.seconds.p50) for row in summarize(everything()).latency] == [
        ("resume to the next pause", 1, 0.03),
        ("resume to the next pause", 64, 0.2),
        ("a token without pauses", 1, 0.02),
        ("read the activation", 64, 0.004),
        ("write it back", 64, 0.005),
        ("engine: put a checkpoint aside", 1, 1e-5),
        ("engine: put a checkpoint aside", 64, 2e-5),
    ]


def test_the_servers_histograms_that_saw_something() -> None:
    findings = Findings(histograms={"seen": histogram(0, 10, 0, 0), "empty": histogram(0, 0, 0, 0)})
    (name, found), *rest = summarize(findings).server.items()
    assert (name, found.count, rest) == ("seen", 10, [])
    assert found.p50 == pytest.approx(5.5e-4)


def test_divergence_counts_turns_and_where_they_part() -> None:
    low, high = summarize(everything()).divergence
    assert (low.layer, low.turns, low.differing) == (3, 2, 1)
    assert low.first is not None
    assert low.first.p50 == 1
    assert (high.differing, high.turns) == (1, 1)


def test_rates_are_compared_within_each_round() -> None:
    kept = summarize(everything()).kept
    assert kept[Arm.UNMATCHED] == Ratio(0.995, 0.995, 0.995, 1)
    assert kept[Arm.STEERED] == Ratio(0.8, 0.8, 0.8, 1)


def test_windows_are_compared_within_each_repeat() -> None:
    windows = [
        Window(0, False, (100,), 100.0),
        Window(0, True, (50,), 100.0),
        Window(1, True, (90,), 90.0),
        Window(1, False, (100,), 100.0),
        Window(2, True, (100,), 100.0),
    ]
    assert list(pair_windows(windows)) == [1.0, 0.9]


def test_a_run_that_was_interrupted_at_once_has_a_summary() -> None:
    summary = summarize(Findings(interrupted=True))
    assert (summary.accuracy, summary.latency, summary.server, summary.divergence) == ([], [], {}, [])
    assert summary.kept_by_others is None


@pytest.mark.parametrize(
    ("pairs", "first", "last"), [(3, 1, 3), (6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (15, 4, 12), (20, 6, 15)]
)
def test_the_bounds_of_a_median_are_those_of_the_tables(pairs: int, first: int, last: int) -> None:
    """As they are printed, for 95 %, in tables of the sign test; up to five pairs have none, and get all."""
    found = Ratio.of([float(number) for number in range(pairs, 0, -1)])
    assert found is not None
    assert (found.low, found.high) == (first, last)
