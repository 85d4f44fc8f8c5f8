"""What an attack costs, beside what an honest neighbour of its size costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.fairness.figures import MOST_GROWTH_BYTES, Neighbour, Outcome, Waits, beside_honest, judge

NEIGHBOURS = [
    Neighbour(4, 300.0, Waits(0.4, 0.04)),
    Neighbour(1, 100.0, Waits(0.2, 0.02)),
    Neighbour(16, 500.0, Waits(1.2, 0.05)),
]
CALM = Outcome("calm", "does nothing", 20, Waits(0.2, 0.02), 100.0, 0, {"200": 3})


@pytest.mark.parametrize(
    ("tokens_per_s", "first_s", "token_s"),
    [(0.0, 0.2, 0.02), (100.0, 0.2, 0.02), (200.0, 0.3, 0.03), (400.0, 0.8, 0.045), (9000.0, 1.2, 0.05)],
)
def test_an_honest_neighbour_of_any_size_is_between_those_that_were_measured(
    tokens_per_s: float, first_s: float, token_s: float
) -> None:
    found = beside_honest(NEIGHBOURS, tokens_per_s)
    assert found.first_s == pytest.approx(first_s)
    assert found.token_s == pytest.approx(token_s)


@pytest.mark.parametrize(
    ("outcome", "is_kept"),
    [
        (CALM, True),
        (replace(CALM, waits=Waits(0.4, 0.04)), True),
        (replace(CALM, waits=Waits(0.41, 0.02)), False),
        (replace(CALM, waits=Waits(0.2, 0.041)), False),
        (replace(CALM, waits=Waits(0.8, 0.08), tokens_per_s=300.0), True),
        (replace(CALM, grown_bytes=MOST_GROWTH_BYTES), True),
        (replace(CALM, grown_bytes=MOST_GROWTH_BYTES + 1), False),
        (replace(CALM, wrong=1), False),
        (replace(CALM, error="/ready answers 500"), False),
    ],
)
def test_an_attack_may_cost_twice_what_an_honest_neighbour_costs(outcome: Outcome, is_kept: bool) -> None:
    assert judge(outcome, NEIGHBOURS).is_kept is is_kept
