"""The line through the times of steps."""

from __future__ import annotations

import random

import pytest

from app.gpu.drafts.costs import StepCosts


def test_steps_of_many_sizes_show_what_a_token_costs() -> None:
    costs, chance = StepCosts(), random.Random(0)
    for _ in range(200):
        tokens = chance.randint(1, 8)
        costs.note(tokens, (25 + 5 * tokens) * chance.uniform(0.98, 1.02))
    assert costs.per_token == pytest.approx(5, rel=0.1)
    assert costs.seconds(4) == pytest.approx(45, rel=0.05)


def test_a_change_of_pace_is_noticed() -> None:
    costs = StepCosts()
    for base in (25, 250):
        for number in range(200):
            tokens = 1 + number % 8
            costs.note(tokens, base + 2 * tokens)
    assert costs.seconds(1) == pytest.approx(252, rel=0.05)


def test_steps_of_one_size_leave_the_share_that_was_assumed() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.note(1, 0.05)
    assert 0.02 * 0.05 < costs.per_token < 0.2 * 0.05


def test_a_token_costs_neither_less_than_nothing_nor_more_than_its_share_of_the_step() -> None:
    falling, steep = StepCosts(), StepCosts()
    for number in range(100):
        tokens = 1 + number % 8
        falling.note(tokens, 20 - tokens)
        steep.note(tokens, tokens**3)
    assert falling.per_token == 0
    assert steep.seconds(0) >= 0
