"""In which order sessions give way, and how much room they would leave."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import Phase, SessionId
from app.gpu.kv_tiers.victims import LAPSE_S, Victims
from app.gpu.state.sequence import TokenSequence

NOW, MARGIN_S = 100.0, 0.5
SESSIONS = st.lists(
    st.tuples(
        st.sampled_from(list(Phase)),
        st.none() | st.floats(NOW - 2 * LAPSE_S, NOW + 10),
        st.integers(1, 9),
    ),
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
def test_the_later_a_session_returns_the_sooner_it_gives_way(
    sessions: list[tuple[Phase, float | None, int]],
) -> None:
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
