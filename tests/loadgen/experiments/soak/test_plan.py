"""Which faults come when, and what is refused."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.experiments.soak.plan import FAULTS, SoakPlan


def test_each_fault_comes_once_in_a_round() -> None:
    coming = [name for _, name in islice(SoakPlan(seed=3).faults(), 3 * len(FAULTS))]
    for begin in range(0, len(coming), len(FAULTS)):
        assert sorted(coming[begin : begin + len(FAULTS)]) == sorted(FAULTS)


def test_faults_come_about_as_often_as_was_asked() -> None:
    waits = [wait_s for wait_s, _ in islice(SoakPlan(every=25).faults(), 200)]
    assert all(20 <= wait_s <= 30 for wait_s in waits)
    assert max(waits) - min(waits) > 5


def test_the_seed_decides() -> None:
    first, again, other = (list(islice(SoakPlan(seed=seed).faults(), 20)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"minutes": 0.0}, "minutes must be a number above 0"),
        ({"every": float("nan")}, "every must be a number above 0"),
        ({"agents": 0}, "agents must be at least 1"),
        ({"context": 103}, "context must be at least 104"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadgenError, match=says):
        SoakPlan(**given)
