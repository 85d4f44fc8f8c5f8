"""A plan is checked before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.experiments.whitebox.plan import WhiteboxPlan, choose_layers


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(12, (3, 6, 9)), (32, (8, 16, 24)), (30, (7, 15, 22)), (4, (1, 2, 3)), (1, (0,))]
)
def test_layers_are_a_quarter_a_half_and_three_quarters_of_the_way_up(num_layers: int, layers: tuple[int, ...]) -> None:
    assert choose_layers(num_layers) == layers


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"sequences": 0}, "sequences"),
        ({"tokens": 1}, "tokens"),
        ({"context": 0}, "context"),
        ({"others": 0}, "others"),
        ({"repeats": 0}, "repeats"),
        ({"seed": -1}, "seed"),
        ({"pause_seconds": 0.0}, "pause_seconds"),
        ({"pause_seconds": float("inf")}, "pause_seconds"),
        ({"pause_seconds": float("nan")}, "pause_seconds"),
        ({"scale": float("nan")}, "scale"),
        ({"layers": (-1,)}, "layers"),
        ({"layers": (3, 3)}, "layers"),
    ],
)
def test_a_value_out_of_range_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadgenError, match=named):
        WhiteboxPlan(**wrong)


def test_there_are_prompts_for_every_trial_and_for_every_other() -> None:
    assert WhiteboxPlan(sequences=10, others=16).prompts(3) == 30
    assert WhiteboxPlan(sequences=2, others=16).prompts(3) == 16
