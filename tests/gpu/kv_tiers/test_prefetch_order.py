"""When sessions must set out so that all are back in time."""

from __future__ import annotations

import math
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import SessionId
from app.gpu.kv_tiers.prefetch import PREFETCH_MARGIN_S, PrefetchMargin, Returns
from app.gpu.state.sequence import Sequence

TIMES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12)
"""Return time and length of the way back of each session."""


def sequence(number: int, return_time: float) -> Sequence:
    return Sequence(SessionId(f"s{number:02}"), b"", resume_at=return_time)


@given(times=TIMES, busy_s=st.integers(0, 9), now=st.integers(0, 60), known_bound=st.booleans())
def test_each_sets_out_early_enough_for_all_who_return_no_later(
    times: list[tuple[int, int]], busy_s: int, now: int, known_bound: bool
) -> None:
    sequences = [sequence(number, float(at)) for number, (at, _) in enumerate(times)]
    lasts = {each.session: float(length) for each, (_, length) in zip(sequences, times, strict=True)}
    returns = Returns(lambda each: lasts[each.session], PrefetchMargin())
    for each in sequences:
        returns.add(each)
    in_order = sorted(sequences, key=lambda each: (each.return_time, each.session))
    ends = list(accumulate((lasts[each.session] for each in in_order), initial=float(busy_s)))[1:]
    starts = [each.return_time - PREFETCH_MARGIN_S - end for each, end in zip(in_order, ends, strict=True)]
    due = max((place for place, start in enumerate(starts, start=1) if start <= now), default=0)
    longest = busy_s + sum(lasts.values()) if known_bound else math.inf
    assert returns.take_due(now, busy_s, longest) == in_order[:due]
    assert returns.next_start == min(starts[due:], default=math.inf)
    returns.take_due(now, ends[due - 1] if due else busy_s, longest)
    assert returns.next_start == min(starts[due:], default=math.inf)


def test_only_the_last_word_of_a_session_counts() -> None:
    returns = Returns(lambda _: 1.0, PrefetchMargin())
    moves, stays = sequence(1, 10.0), sequence(2, 50.0)
    returns.add(moves)
    returns.add(stays)
    moves.resume_at = 20.0
    returns.add(moves)
    assert returns.take_due(15.0, 0.0, math.inf) == []
    returns.remove(moves)
    assert returns.take_due(60.0, 0.0, math.inf) == [stays]
