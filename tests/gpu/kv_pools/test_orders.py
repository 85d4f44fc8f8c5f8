"""In which order a worker gets what it is ordered to do."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import SessionId
from app.gpu.kv.moves import Move, MoveKind
from app.gpu.kv_pools.orders import Orders

READ, WRITE, DELETE = MoveKind.FROM_DISK, MoveKind.TO_DISK, MoveKind.DELETE
GIVEN = st.lists(st.tuples(st.sampled_from([READ, WRITE, DELETE]), st.sampled_from("abcd")), max_size=12)


def order_of(given: list[tuple[MoveKind, str]]) -> list[Move]:
    """The moves in the order in which they come out."""
    orders = Orders[Move, None]()
    for number, (kind, session) in enumerate(given):
        orders.put(Move(number, kind, SessionId(session)), None)
    orders.close()
    done = []
    while (order := orders.get()) is not None:
        done.append(order[0])
    return done


def test_a_read_does_not_wait_for_fifty_writes() -> None:
    done = order_of([(WRITE, f"parks {number}") for number in range(50)] + [(READ, "returns")])
    assert done[0].kind is READ


@given(given=GIVEN)
def test_what_is_ordered_for_one_session_is_done_in_its_order(given: list[tuple[MoveKind, str]]) -> None:
    done = order_of(given)
    assert sorted(move.number for move in done) == list(range(len(given)))
    for session in "abcd":
        numbers = [move.number for move in done if move.session == session]
        assert numbers == sorted(numbers)


@given(given=GIVEN)
def test_reads_that_depend_on_nothing_come_first(given: list[tuple[MoveKind, str]]) -> None:
    free = [
        number
        for number, (kind, session) in enumerate(given)
        if kind is READ and all(kind is READ for kind, other in given[:number] if other == session)
    ]
    assert [move.number for move in order_of(given)[: len(free)]] == free


def test_who_waits_gets_what_comes_and_none_once_it_is_over() -> None:
    orders, got = Orders[Move, None](), list[object]()
    worker = threading.Thread(target=lambda: got.extend(iter(orders.get, None)))
    worker.start()
    orders.put(Move(1, WRITE, SessionId("a")), None)
    orders.put(Move(2, READ, SessionId("b")), None)
    orders.close()
    worker.join(timeout=5)
    assert len(got) == 2
