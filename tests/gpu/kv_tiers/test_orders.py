"""In which order sessions give way, and when prefetches must begin so that all sessions are back in time."""

from __future__ import annotations

import math
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import Phase, SessionId
from app.gpu.kv_tiers.prefetch import PrefetchOrder
from app.gpu.kv_tiers.victims import LAPSE_S, Victims
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


def test_what_a_restore_moves_is_as_of_the_last_note() -> None:
    blocks = (0, 0)
    order = PrefetchOrder(lambda _: blocks)
    waits = sequence(1, 10.0)
    order.add(waits)
    blocks = (3, 3)
    assert order.take_due(8.0, MARGIN_S, (1.0, 1.0), busy_s=0) == []
    order.note_moved(waits)
    assert order.take_due(8.0, MARGIN_S, (1.0, 1.0), busy_s=0) == [waits]


NOW, MARGIN_S = 100.0, 0.5

SESSIONS = st.lists(
    st.tuples(st.sampled_from(list(Phase)), st.none() | st.floats(NOW - 2 * LAPSE_S, NOW + 10), st.integers(1, 9)),
    max_size=12,
)
"""Phase, return time and blocks of each."""


def make(sessions: list[tuple[Phase, float | None, int]]) -> list[TokenSequence]:
    return [
        TokenSequence(SessionId(f"s{number}"), b"", blocks=[0] * blocks, phase=phase, resume_at=resume_at)
        for number, (phase, resume_at, blocks) in enumerate(sessions)
    ]


def rank(sequence: TokenSequence) -> tuple[int, float]:
    """From the documented rule, one session at a time."""
    late_s = NOW - sequence.return_time
    if late_s >= LAPSE_S:
        return 2, -math.inf
    if late_s >= -2 * MARGIN_S or sequence.phase is Phase.READY:
        return 3, (0.0 if late_s >= -2 * MARGIN_S else -sequence.return_time)
    return [Phase.IDLE, Phase.IO_WAIT, Phase.COMPUTE].index(sequence.phase), -sequence.return_time


@given(sessions=SESSIONS)
def test_the_later_a_session_returns_the_sooner_it_gives_way(sessions: list[tuple[Phase, float | None, int]]) -> None:
    sequences = make(sessions)
    victims = Victims.by_return(sequences, NOW, MARGIN_S)
    assert [rank(each) for each in victims.in_order()] == sorted(map(rank, sequences))
    assert victims.blocks() == sum(len(each.blocks) for each in sequences)


@given(sessions=SESSIONS, back_at=st.floats(NOW, NOW + 10), gone=st.integers(0, 12))
def test_a_prefetch_takes_room_only_from_those_that_return_later(
    sessions: list[tuple[Phase, float | None, int]], back_at: float, gone: int
) -> None:
    sequences = make(sessions)
    victims = Victims.by_return(sequences, NOW, MARGIN_S)
    for victim in [each for each, _ in zip(victims.in_order(back_at), range(gone), strict=False)]:
        victim.blocks = []
    may = [each for each in sequences if each.blocks and rank(each)[0] < 3 and -rank(each)[1] > back_at]
    assert victims.blocks(back_at) == sum(len(each.blocks) for each in may)
    assert set(victims.in_order(back_at)) == set(may)
