"""When prefetches must begin so that all sessions are back in time."""

from __future__ import annotations

import math
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import SessionId
from app.gpu.kv_tiers.prefetch import PrefetchOrder
from app.gpu.state.sequence import TokenSequence

MARGIN_S = 0.125
TIMES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4), st.integers(0, 9)), max_size=12)
"""Return time of each session, and the blocks that its restore reads from disk and copies to the device."""


def sequence(number: int, return_time: float) -> TokenSequence:
    return TokenSequence(SessionId(f"s{number:02}"), b"", resume_at=return_time)


@given(times=TIMES, busy_s=st.integers(0, 9), now=st.integers(0, 60))
def test_each_prefetch_begins_early_enough_for_all_that_return_no_later(
    times: list[tuple[int, int, int]], busy_s: int, now: int
) -> None:
    sequences = [sequence(number, float(at)) for number, (at, _, _) in enumerate(times)]
    blocks = {each.session: (disk, link) for each, (_, disk, link) in zip(sequences, times, strict=True)}
    order = PrefetchOrder(lambda each: blocks[each.session])
    for each in sequences:
        order.add(each)
    in_order = sorted(sequences, key=lambda each: (each.return_time, each.session))
    restore_s = [2 * disk + link for disk, link in (blocks[each.session] for each in in_order)]
    ends = list(accumulate(restore_s, initial=busy_s))[1:]
    starts = [each.return_time - MARGIN_S - end for each, end in zip(in_order, ends, strict=True)]
    due = max((place for place, start in enumerate(starts, start=1) if start <= now), default=0)
    assert order.take_due(now, MARGIN_S, (2.0, 1.0), busy_s=busy_s) == in_order[:due]
    assert order.next_start == min(starts[due:], default=math.inf)
    assert order.take_due(now, MARGIN_S, (2.0, 1.0), busy_s=ends[due - 1] if due else busy_s) == []
    assert order.next_start == min(starts[due:], default=math.inf)


def test_only_the_last_word_of_a_session_counts() -> None:
    order = PrefetchOrder(lambda _: (0, 1))
    moves, stays = sequence(1, 10.0), sequence(2, 50.0)
    order.add(moves)
    order.add(stays)
    moves.resume_at = 20.0
    order.add(moves)
    assert order.take_due(15.0, MARGIN_S, (1.0, 1.0), busy_s=0) == []
    order.remove(moves)
    assert order.take_due(60.0, MARGIN_S, (1.0, 1.0), busy_s=0) == [stays]
    assert len(order) == 0


def test_what_a_restore_moves_is_as_of_the_last_note() -> None:
    blocks = (0, 0)
    order = PrefetchOrder(lambda _: blocks)
    waits = sequence(1, 10.0)
    order.add(waits)
    blocks = (3, 3)
    assert order.take_due(8.0, MARGIN_S, (1.0, 1.0), busy_s=0) == []
    order.note_moved(waits)
    assert order.take_due(8.0, MARGIN_S, (1.0, 1.0), busy_s=0) == [waits]
