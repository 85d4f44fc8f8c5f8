"""What is measured, in which order, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.experiments.weights.findings import Way
from loadgen.experiments.weights.plan import Cell, WeightsPlan, order_of_ways, ways_of


def test_the_smallest_batch_is_also_measured_cold() -> None:
    assert WeightsPlan(batches=(8, 1)).cells == (Cell(8), Cell(1))
    assert WeightsPlan(batches=(8, 1), cold=True).cells == (Cell(8), Cell(1), Cell(1, cold=True))


def test_where_a_disk_is_waited_for_only_those_take_part_that_read_from_one() -> None:
    assert set(ways_of(Cell(1), tuple(Way))) == set(Way)
    assert set(Way) - set(ways_of(Cell(1, cold=True), tuple(Way))) == {Way.RESIDENT, Way.DEEPSPEED}


def test_every_way_is_first_and_last_as_often_as_the_others() -> None:
    ways = tuple(Way)
    orders = [order_of_ways(ways, repeat, cell) for repeat in range(len(ways)) for cell in range(3)]
    for place in range(len(ways)):
        assert set(Counter(order[place] for order in orders).values()) == {3}


def test_every_batch_has_as_much_to_compute_before_its_first_tokens() -> None:
    plan = WeightsPlan(batches=(1, 8, 32), prompt=1024)
    assert [batch * plan.prompt_tokens(batch) for batch in plan.batches] == [1024, 1024, 1024]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batches": ()}, "batches must be different numbers from 1"),
        ({"batches": (1, 1)}, "batches must be different numbers from 1"),
        ({"batches": (0,)}, "batches must be different numbers from 1"),
        ({"chunks": (0,)}, "chunks must be different numbers from 1"),
        ({"batches": (32,), "prompt": 63}, "prompt must be at least 64: 2 tokens for each session"),
        ({"tokens": 1}, "tokens must be at least 2"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_what_is_out_of_range_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadgenError, match=message):
        WeightsPlan(**changed)
