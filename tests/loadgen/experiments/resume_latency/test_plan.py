"""Where sessions are paused, in which order, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.experiments.resume_latency.findings import Way
from loadgen.experiments.resume_latency.plan import (
    DEPTHS,
    Cell,
    ResumePlan,
    checked_cells,
    choose_layers,
    depth_of,
    order_of_ways,
)


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(40, (0, 9, 19, 29, 39)), (30, (0, 7, 14, 22, 29)), (4, (0, 1, 2, 3)), (1, (0,))],
)
def test_at_least_so_many_percent_of_the_layers_have_run(num_layers: int, layers: tuple[int, ...]) -> None:
    found = choose_layers(num_layers, DEPTHS)
    assert found == layers
    assert all(any(depth_of(layer, num_layers) >= depth for layer in found) for depth in DEPTHS)


def test_every_way_is_first_second_and_last_as_often_as_the_others() -> None:
    orders = [order_of_ways(tuple(Way), repeat, cell) for repeat in range(3) for cell in range(5)]
    for place in range(len(Way)):
        assert set(Counter(order[place] for order in orders).values()) == {5}
    assert all(set(order) == set(Way) for order in orders)


def test_answers_are_compared_at_another_layer_for_each_length() -> None:
    assert checked_cells([64, 128, 256], [0, 3]) == (Cell(64, 0), Cell(128, 3), Cell(256, 0))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": (1,)}, "lengths must be different numbers from 2"),
        ({"lengths": (64, 64)}, "lengths must be different numbers from 2"),
        ({"lengths": ()}, "lengths must be different numbers from 2"),
        ({"depths": (0.0,)}, "depths must be above 0 and at most 100"),
        ({"depths": (101.0,)}, "depths must be above 0 and at most 100"),
        ({"depths": (float("nan"),)}, "depths must be above 0 and at most 100"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_what_is_out_of_range_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadgenError, match=message):
        ResumePlan(**changed)
