"""Figures and targets, on measurements made by hand."""

import pytest

from benchmarks.breakpoints.figures import figures_of
from benchmarks.breakpoints.plan import KINDS
from benchmarks.breakpoints.runner import DecodeRound, Measured
from benchmarks.engine.pauses import PauseTimes
from benchmarks.figures import Figure, figure_table


def rates(*values: float) -> dict[str, float]:
    return dict(zip(KINDS, values, strict=True))


MEASURED = Measured(
    decode_pauses=[PauseTimes(1e-4, 2e-5, 5e-4), PauseTimes(1e-4, 4e-5, 7e-4), PauseTimes(1e-4, 6e-5, 1e-2)],
    prefill_pauses=[PauseTimes(1e-3, 2e-5, 3e-3)] * 2,
    rounds=[
        DecodeRound(16, rates(200.0, 196.0, 199.0, 180.0)),
        DecodeRound(16, rates(100.0, 99.5, 98.0, 50.0)),
        DecodeRound(16, rates(200.0, 202.0, 196.0, 160.0)),
        DecodeRound(1, rates(40.0, 20.0, 40.0, 40.0)),
        DecodeRound(1, rates(40.0, 20.0, 40.0, 40.0)),
    ],
    other_cpu_share=0.0,
)


def figure(label: str) -> Figure:
    [found] = [figure for figure in figures_of(MEASURED) if figure.label == label]
    return found


def row(label: str) -> tuple[str, ...]:
    [found] = [row for row in figure_table("", figures_of(MEASURED)).rows if row[0] == label]
    return found[1:]


def test_times_are_in_milliseconds_and_held_against_their_targets() -> None:
    assert row("Resume taken, decode, p50") == ("0.040 ms [0.030, 0.050]", "≤ 0.1 ms", "yes")
    assert row("Checkpoint restored, prefill of 512 tokens, p50") == ("3.00 ms", "≤ 2 ms", "no")


def test_one_slow_restore_shows_in_the_99th_percentile_only() -> None:
    assert row("Checkpoint restored, decode, p50")[-1] == "yes"
    assert figure("Checkpoint restored, decode, p99").spread.median > 9


def test_throughput_is_compared_within_its_round() -> None:
    # 196 / 200, 99.5 / 100, 202 / 200.
    found = figure("Throughput of 16 sessions beside a paused one / alone")

    assert found.spread.median == pytest.approx(0.995)
    assert found.target is not None
    assert found.target.is_met(0.99)
    assert not found.target.is_met(0.98)


def test_breakpoints_that_do_not_match_cost_time() -> None:
    # 200 / 199, 100 / 98, 200 / 196.
    found = figure("Time with breakpoints that do not match / without, 16 sessions")

    assert found.spread.median == pytest.approx(100 / 98)
    assert row(found.label)[-1] == "no"


def test_a_single_session_has_figures_of_its_own_and_no_throughput_target() -> None:
    assert row("Throughput of 1 session beside a paused one / alone") == ("0.500 ×", "", "")
    assert row("Time steered (scale) / not, 1 session") == ("1.000 ×", "", "")
