"""In which order sessions give way, and when prefetches must begin so that all sessions are back in time. What that
costs depends on what changes, not on how many sessions there are: counted in calls, not in seconds.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import Phase, SessionId, Tier
from app.gpu.kv.phases import BLOCKS_A_LOOK, TRIED
from app.gpu.kv.ranking import LAPSE_S, ReturnOrder, Victims, rank
from app.gpu.state.sequence import TokenSequence
from tests.gpu.kv.tiering import BLOCK_SIZE, Bench, growth, tier_of

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
    order = ReturnOrder(lambda each: blocks[each.session])
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
    order = ReturnOrder(lambda _: (0, 1))
    moves, stays = sequence(1, 10.0), sequence(2, 50.0)
    order.add(moves)
    order.add(stays)
    moves.resume_at = 20.0
    order.add(moves)
    assert order.take_due(15.0, MARGIN_S, (1.0, 1.0), busy_s=0) == []
    order.remove(moves)
    assert order.take_due(60.0, MARGIN_S, (1.0, 1.0), busy_s=0) == [stays]


NOW = 100.0

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


def rule(sequence: TokenSequence) -> tuple[int, float]:
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
    victims = Victims((rank(each, NOW, MARGIN_S), each) for each in sequences)
    assert [rule(each) for each in victims.in_order()] == sorted(map(rule, sequences))
    assert victims.blocks() == sum(len(each.blocks) for each in sequences)


@given(sessions=SESSIONS, back_at=st.floats(NOW, NOW + 10), gone=st.integers(0, 12))
def test_a_prefetch_takes_room_only_from_those_that_return_later(
    sessions: list[tuple[Phase, float | None, int]], back_at: float, gone: int
) -> None:
    sequences = make(sessions)
    victims = Victims((rank(each, NOW, MARGIN_S), each) for each in sequences)
    for victim in [each for each, _ in zip(victims.in_order(back_at), range(gone), strict=False)]:
        victim.blocks = []
    may = [each for each in sequences if each.blocks and rule(each)[0] < 3 and -rule(each)[1] > back_at]
    assert victims.blocks(back_at) == sum(len(each.blocks) for each in may)
    assert set(victims.in_order(back_at)) == set(may)


def crowded(number: int) -> tuple[Bench, list[TokenSequence]]:
    """A device that a session which runs has to itself: others are away, half of which are due."""
    bench = Bench(device=16, host=8 * number)
    sessions = []
    for each in range(2 * number):
        resume_in_s = 1.0 if each < number else 1000.0
        sessions.append(bench.session(2 * BLOCK_SIZE, Phase.IO_WAIT, resume_in_s, first_token=each))
    bench.begin_turn(bench.session(16 * BLOCK_SIZE, first_token=-1))
    bench.now += 10
    bench.phases.tick()
    assert {tier_of(each) for each in sessions} == {Tier.HOST}
    return bench, sessions


def without_host(number: int) -> tuple[Bench, list[TokenSequence]]:
    """Sessions that would leave the device, and find no room on the host."""
    bench = Bench(device=2 * number, host=0, disk=0)
    sessions = [bench.session(2 * BLOCK_SIZE, first_token=each) for each in range(number)]
    for sequence in sessions:
        bench.phases.signal(sequence, Phase.IO_WAIT, 1000.0)
    bench.phases.tick()
    bench.placement.take_placed()
    return bench, sessions


@pytest.mark.parametrize("make", [crowded, without_host])
@pytest.mark.parametrize("what", ["a look without news", "a word of one session"])
def test_a_look_costs_the_same_beside_ten_times_as_many_sessions(
    make: Callable[[int], tuple[Bench, list[TokenSequence]]], what: str
) -> None:
    def prepare(number: int) -> Callable[[], object]:
        bench, sessions = make(number)
        if what == "a word of one session":
            return partial(bench.phases.signal, sessions[-1], Phase.IO_WAIT, 900.0)
        bench.placement.changed = True
        return bench.phases.tick

    assert growth(prepare) < 1.2


def test_room_for_a_small_session_is_used_although_larger_ones_come_first() -> None:
    bench = Bench(device=16, host=64)
    large = [bench.session(5 * BLOCK_SIZE, Phase.IO_WAIT, 1.0, first_token=number) for number in range(TRIED - 1)]
    small = bench.session(2 * BLOCK_SIZE, Phase.IO_WAIT, 2.0, first_token=-1)
    bench.begin_turn(bench.session(13 * BLOCK_SIZE, first_token=-2))
    bench.now += 10
    bench.phases.tick()
    assert (tier_of(small), {tier_of(each) for each in large}) == (Tier.DEVICE, {Tier.HOST})


def test_a_look_begins_a_part_of_many_prefetches_and_the_next_goes_on() -> None:
    count, blocks = 10, BLOCKS_A_LOOK // 4
    bench = Bench(device=count * blocks, host=count * blocks)
    sessions = [bench.session(blocks * BLOCK_SIZE, first_token=number) for number in range(count)]
    for sequence in sessions:
        bench.phases.signal(sequence, Phase.IO_WAIT, 1000.0)
    bench.finish()
    bench.overwrite_device()
    bench.now += 1000
    bench.phases.tick()
    assert [tier_of(each) for each in sessions].count(Tier.TO_DEVICE) == 4
    assert bench.phases.next_alarm() == bench.now
    bench.phases.tick()
    assert [tier_of(each) for each in sessions].count(Tier.TO_DEVICE) == 8
    bench.finish()
    assert {tier_of(each) for each in sessions} == {Tier.DEVICE}


def test_a_drain_of_ten_times_as_many_sessions_costs_no_more_for_each() -> None:
    def prepare(number: int) -> Callable[[], object]:
        bench = Bench(device=2 * number, host=2 * number)
        for each in range(number):
            bench.phases.signal(bench.session(2 * BLOCK_SIZE, first_token=each), Phase.IO_WAIT, 1000.0)
        return bench.finish

    assert 8 < growth(prepare) < 12, "all of them leave"


def test_room_for_one_prompt_costs_no_more_for_each_of_ten_times_as_many_that_leave() -> None:
    assert 8 < growth(lambda number: make_all_room(number, on_host=False)) < 12


def make_all_room(number: int, *, on_host: bool) -> Callable[[], object]:
    """One prompt asks for the whole device, which so many sessions fill. The host is empty, or full too."""
    bench = Bench(device=2 * number, host=2 * number, disk=4 * number)
    for each in range(number) if on_host else ():
        bench.placed(2, Tier.HOST, first_token=-1 - each)
    for each in range(number):
        bench.session(2 * BLOCK_SIZE, first_token=each)
    turn = bench.session(0)
    bench.begin_turn(turn)
    return partial(bench.placement.make_room, 2 * number, turn)


def test_those_who_give_way_look_for_room_on_a_full_host_once() -> None:
    assert 8 < growth(lambda number: make_all_room(number, on_host=True), few=20) < 15
