"""When prefetches must begin so that all sessions are back in time."""

from __future__ import annotations

import math
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import SessionId
from app.gpu.kv_tiers.prefetch import PREFETCH_MARGIN_S, PrefetchMargin, PrefetchOrder
from app.gpu.state.sequence import TokenSequence

TIMES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12)
"""Return time and length of the restore of each session."""


def sequence(number: int, return_time: float) -> TokenSequence:
    return TokenSequence(SessionId(f"s{number:02}"), b"", resume_at=return_time)


@given(times=TIMES, busy_s=st.integers(0, 9), now=st.integers(0, 60), known_bound=st.booleans())
def test_each_prefetch_begins_early_enough_for_all_that_return_no_later(
    times: list[tuple[int, int]], busy_s: int, now: int, known_bound: bool
) -> None:
    sequences = [sequence(number, float(at)) for number, (at, _) in enumerate(times)]
    restore_s = {each.session: float(length) for each, (_, length) in zip(sequences, times, strict=True)}
    order = PrefetchOrder(lambda each: restore_s[each.session], PrefetchMargin())
    for each in sequences:
        order.add(each)
    in_order = sorted(sequences, key=lambda each: (each.return_time, each.session))
    ends = list(accumulate((restore_s[each.session] for each in in_order), initial=float(busy_s)))[1:]
    starts = [each.return_time - PREFETCH_MARGIN_S - end for each, end in zip(in_order, ends, strict=True)]
    due = max((place for place, start in enumerate(starts, start=1) if start <= now), default=0)
    all_s = busy_s + sum(restore_s.values()) if known_bound else math.inf
    assert order.take_due(now, busy_s, all_s) == in_order[:due]
    assert order.next_start == min(starts[due:], default=math.inf)
    order.take_due(now, ends[due - 1] if due else busy_s, all_s)
    assert order.next_start == min(starts[due:], default=math.inf)


def test_only_the_last_word_of_a_session_counts() -> None:
    order = PrefetchOrder(lambda _: 1.0, PrefetchMargin())
    moves, stays = sequence(1, 10.0), sequence(2, 50.0)
    order.add(moves)
    order.add(stays)
    moves.resume_at = 20.0
    order.add(moves)
    assert order.take_due(15.0, 0.0, math.inf) == []
    order.remove(moves)
    assert order.take_due(60.0, 0.0, math.inf) == [stays]
