"""Figures and targets, on rounds made by hand."""

from dataclasses import replace

import pytest

from benchmarks.figures import Figure, figure_table
from benchmarks.kv.bandwidth import Copies, CopyRound
from benchmarks.kv.figures import figures_of
from benchmarks.kv.parks import ParkedTwice
from benchmarks.kv.resume import ResumedTurn, ResumeRound
from benchmarks.kv.runner import Measured
from benchmarks.kv.signals import SignalTimes
from loadgen.results.spread import Spread
from loadgen.targets.histogram import Bucket


def resume_round(resident: float, again: float, ready: float, cold: float) -> ResumeRound:
    """Times to the first token; a cold turn waited 10 ms for its KV."""
    return ResumeRound(
        resident=ResumedTurn(resident, 0.0),
        resident_again=ResumedTurn(again, 0.0),
        ready=ResumedTurn(ready, 0.0),
        cold=ResumedTurn(cold, 0.010),
    )


MEASURED = Measured(
    session_bytes=2**20,
    copies=Copies([CopyRound(1e-3, 1e-3, 2e-3, 1e-3, 0.5e-3)] * 3, first_out_s=[1e-2]),
    resumes=[
        resume_round(resident=0.100, again=0.104, ready=0.101, cold=0.120),
        resume_round(resident=0.200, again=0.190, ready=0.210, cold=0.230),
        resume_round(resident=0.100, again=0.102, ready=0.102, cold=0.110),
    ],
    parks=[ParkedTwice(64, 4), ParkedTwice(64, 8)],
    signals=SignalTimes([0.001] * 99 + [0.1], [Bucket(5e-5, 99), Bucket(1e-4, 100), Bucket(1.0, 100)]),
    other_cpu_share=0.0,
)


def figure(measured: Measured, label: str) -> Figure:
    [found] = [figure for figure in figures_of(measured) if figure.label == label]
    return found


def row(measured: Measured, label: str) -> tuple[str, ...]:
    [found] = [row for row in figure_table("", figures_of(measured)).rows if row[0] == label]
    return found[1:]


def test_a_move_that_takes_twice_as_long_has_half_the_rate() -> None:
    cells = row(MEASURED, "Move out, scattered blocks, of the plain copy's rate")

    assert cells == ("0.500 ×", "≥ 0.9 ×", "no")


def test_a_move_as_fast_as_the_plain_copy_meets_its_target() -> None:
    assert row(MEASURED, "Move in, neighbouring blocks, of the plain copy's rate")[-1] == "yes"


def test_medians_of_turns_are_compared() -> None:
    # Of 101, 210 and 102 ms over that of 100, 200 and 100 ms; of 104, 190 and 102 ms over the same.
    assert figure(MEASURED, "`ready` sent ahead / resident").spread.median == pytest.approx(1.02)
    assert figure(MEASURED, "Resident again / resident: the noise").spread.median == pytest.approx(1.04)


def test_a_cold_turn_may_take_as_long_as_the_restore_and_a_resident_one() -> None:
    # Medians of 120, 230 and 110 ms, and of 110, 210 and 110 ms.
    cold = figure(MEASURED, "Cold / (resident + restore)")

    assert cold.spread.median == pytest.approx(120 / 110)
    assert cold.target is not None
    assert not cold.target.is_met(cold.spread.median)
    assert cold.target.is_met(1.0)


def test_the_second_park_is_a_share_of_the_first() -> None:
    assert figure(MEASURED, "Bytes of a second park / first").spread == Spread(0.09375, 0.0625, 0.125, 2)


def test_a_slow_signal_shows_in_the_99th_percentile_only() -> None:
    assert row(MEASURED, "Signal, HTTP round trip, p50")[0] == "1.00 ms"
    assert figure(MEASURED, "Signal, HTTP round trip, p99").spread.median > 1.5
    assert row(MEASURED, "Signal, in the server, p99") == ("0.050 ms", "≤ 0.1 ms", "yes")


def test_a_server_that_does_not_time_signals_has_no_line_for_it() -> None:
    silent = replace(MEASURED, signals=SignalTimes([0.001, 0.002], None))

    assert not [figure for figure in figures_of(silent) if "in the server" in figure.label]
