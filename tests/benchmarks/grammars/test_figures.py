"""Figures and targets, on measurements made by hand."""

from __future__ import annotations

from benchmarks.figures import figure_table
from benchmarks.grammars.figures import figures_of
from benchmarks.grammars.runner import DecodeRound, Measured

MEASURED = Measured(
    rounds=[
        DecodeRound(32, 0.100, 0.104),
        DecodeRound(32, 0.200, 0.206),
        DecodeRound(32, 0.080, 0.090),
        DecodeRound(1, 0.020, 0.030),
        DecodeRound(1, 0.020, 0.030),
    ],
    other_cpu_share=0.0,
)


def row(label: str) -> tuple[str, ...]:
    [found] = [row for row in figure_table("", figures_of(MEASURED)).rows if row[0] == label]
    return found[1:]


def test_steps_are_compared_within_their_round() -> None:
    # 104 / 100, 206 / 200, 90 / 80.
    value, target, met = row("Step with schemas / without, 32 sessions")
    assert value.startswith("1.040 ×")
    assert (target, met) == ("≤ 1.05 ×", "yes")


def test_a_single_session_has_figures_of_its_own() -> None:
    assert row("Decode step, 1 session")[0] == "20.00 ms"
    assert row("Step with schemas / without, 1 session") == ("1.500 ×", "≤ 1.05 ×", "no")
