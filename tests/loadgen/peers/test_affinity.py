"""Conversations stick to their workers."""

from __future__ import annotations

from loadgen.peers.baseline.affinity import Affinity


def test_conversations_are_divided_evenly_and_come_back_to_their_worker() -> None:
    affinity = Affinity(2)
    workers = []
    for number in range(4):
        workers.append(affinity.worker((number, 0)))
        affinity.remember((number, 0, 7), workers[-1])
    assert sorted(workers) == [0, 0, 1, 1]
    assert [affinity.worker((number, 0, 7, 8)) for number in range(4)] == workers


def test_the_longest_history_decides() -> None:
    affinity = Affinity(2)
    affinity.remember((1,), 0)
    affinity.remember((1, 2), 1)
    assert affinity.worker((1, 2, 3)) == 1


def test_a_conversation_that_began_alike_is_another() -> None:
    affinity = Affinity(2)
    affinity.remember((1, 2, 3), affinity.worker((1, 2)))
    assert affinity.worker((1, 2, 4)) == 1
