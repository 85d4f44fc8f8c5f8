"""How sessions grow, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.experiments.oversubscribe.findings import Budget
from loadgen.experiments.oversubscribe.plan import OversubscribePlan
from tests.loadgen.experiments.oversubscribe.building import BUDGET


@pytest.mark.parametrize(("context", "turns", "tokens"), [(1024, 4, 16), (100, 3, 7), (6, 3, 1)])
def test_the_last_turn_ends_at_the_context(context: int, turns: int, tokens: int) -> None:
    plan = OversubscribePlan(context=context, turns=turns, tokens=tokens)
    assert sum(plan.new_tokens) + turns * tokens == context
    assert max(plan.new_tokens) - min(plan.new_tokens) <= 1
    assert [len(agent.turns) for agent in plan.trace] == plan.sessions * [turns]


@pytest.mark.parametrize(("checked", "numbers"), [(0, ()), (2, (0, 5)), (3, (0, 3, 6)), (99, tuple(range(10)))])
def test_checked_sessions_are_spread_over_all(checked: int, numbers: tuple[int, ...]) -> None:
    assert OversubscribePlan(sessions=10, checked=checked).checked_sessions == numbers


def test_demand_is_whole_blocks() -> None:
    budget: Budget = BUDGET
    assert [budget.demand(tokens) // budget.block_bytes for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sessions": 0}, "sessions must be at least 1"),
        ({"turns": 0}, "turns must be at least 1"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"checked": -1}, "checked must be at least 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"context": 67}, "context must be at least 68"),
    ],
)
def test_what_is_out_of_range_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadgenError, match=message):
        OversubscribePlan(**changed)
