"""A target that is missed is said to be, and only what was measured can be met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from loadgen.experiments.whitebox.findings import Arm, Findings, Rates, Steered, Trial, Window
from loadgen.experiments.whitebox.report import judge
from loadgen.experiments.whitebox.summary import summarize
from loadgen.results.verdicts import Outcome
from tests.loadgen.experiments.whitebox.building import everything, histogram, memory


def outcomes(findings: Findings) -> dict[str, Outcome]:
    return {verdict.what: verdict.outcome for verdict in judge(summarize(findings), findings)}


def test_all_is_met_where_all_is_well() -> None:
    assert set(outcomes(everything()).values()) == {Outcome.MET}


def test_nothing_is_met_where_nothing_was_measured() -> None:
    assert set(outcomes(Findings()).values()) == {Outcome.UNKNOWN}


MISSES: list[tuple[str, Callable[[Findings], Findings]]] = [
    ("tokens that", lambda good: replace(good, trials=[*good.trials, Trial(9, 0, (1, 2), (1, 3), 1, 1)])),
    ("tokens that", lambda good: replace(good, trials=[*good.trials, Trial(9, 0, (1, 2), (1, 2), 1, 0)])),
    (
        "restored",
        lambda good: replace(
            good, histograms={**good.histograms, "djinn_checkpoint_restore_seconds": histogram(1, 1, 3, 0)}
        ),
    ),
    (
        "dispatched",
        lambda good: replace(
            good, histograms={**good.histograms, "djinn_resume_dispatch_seconds": histogram(1, 2, 0, 0)}
        ),
    ),
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


def test_a_server_without_histograms_is_not_held_to_them() -> None:
    found = outcomes(replace(everything(), histograms={}))
    assert list(found.values()).count(Outcome.UNKNOWN) == 2
    assert Outcome.MISSED not in found.values()


def test_a_rate_whose_bounds_have_the_target_between_them_is_neither_met_nor_missed() -> None:
    rates = [Rates({Arm.PLAIN: 100.0, Arm.UNMATCHED: kept, Arm.STEERED: 80.0}) for kept in (90.0, 98.0, 106.0)]
    found = outcomes(replace(everything(), rates=rates))
    assert [what for what, outcome in found.items() if outcome is Outcome.UNDECIDED] == [
        "decode rate kept with a breakpoint that never matches"
    ]
    assert Outcome.MISSED not in found.values()
