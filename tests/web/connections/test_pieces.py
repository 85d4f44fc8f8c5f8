"""How many small pieces one connection may send."""

from __future__ import annotations

from itertools import count

from app.web.connections.pieces import BURST, FULL_BYTES, PER_S, SmallPieces


def taken_at_once(pieces: SmallPieces, size: int, now: float) -> int:
    return next(number for number in count() if not pieces.take(size, now))


def test_tiny_pieces_have_a_bound_and_half_large_ones_twice_that() -> None:
    assert taken_at_once(SmallPieces(), 0, 7.0) == BURST
    assert taken_at_once(SmallPieces(), FULL_BYTES // 2, 7.0) == 2 * BURST


def test_pieces_that_are_not_small_may_come_for_ever_and_pay_for_no_others() -> None:
    pieces = SmallPieces()
    assert all(pieces.take(size, 7.0) for size in [FULL_BYTES, 1 << 16] * 2 * BURST)
    assert taken_at_once(pieces, 0, 7.0) == BURST


def test_time_makes_room_for_more_but_never_for_more_than_at_first() -> None:
    pieces = SmallPieces()
    assert all(pieces.take(0, number / PER_S) for number in range(10 * BURST))
    taken_at_once(pieces, 0, 1000.0)
    assert taken_at_once(pieces, 0, 2000.0) == BURST
