"""Conversations stick to their workers."""

from __future__ import annotations

import pytest

from loadgen.rivals.baseline.affinity import Affinity


def turn(affinity: Affinity, prompt: tuple[int, ...], answer: tuple[int, ...]) -> int:
    """One turn from beginning to end; the worker that had it."""
    worker = affinity.begin(prompt)
    affinity.end(worker, (*prompt, *answer))
    return worker


def test_conversations_are_divided_evenly_and_come_back_to_their_worker() -> None:
    affinity = Affinity(2)
    workers = [turn(affinity, (number, 0), (7,)) for number in range(4)]
    assert sorted(workers) == [0, 0, 1, 1]
    assert [affinity.begin((number, 0, 7, 8)) for number in range(4)] == workers


@pytest.mark.parametrize("answer", [None, (1, 2)])
def test_a_turn_that_is_over_counts_no_more_than_its_conversation(answer: tuple[int, ...] | None) -> None:
    """A failed one leaves nothing: the next conversation goes to the same worker."""
    affinity = Affinity(2)
    affinity.end(affinity.begin((1,)), answer)
    assert affinity.begin((9,)) == (0 if answer is None else 1)
