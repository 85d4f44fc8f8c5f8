"""What it costs to look for sessions that leave or return depends on what changes, not on how many sessions there are:
counted in calls, not in seconds.
"""

from collections.abc import Callable
from functools import partial

import pytest

from app.domain.values import Phase, Tier
from app.gpu.kv.phases import BLOCKS_A_LOOK, TRIED
from app.gpu.state.sequence import TokenSequence
from tests.gpu.kv.tiering import BLOCK_SIZE, Bench, growth, tier_of


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


def drain(number: int) -> Callable[[], object]:
    """All of so many sessions leave."""
    bench = Bench(device=2 * number, host=2 * number)
    for each in range(number):
        bench.phases.signal(bench.session(2 * BLOCK_SIZE, first_token=each), Phase.IO_WAIT, 1000.0)
    return bench.finish


def make_all_room(number: int, *, on_host: bool = False) -> Callable[[], object]:
    """One prompt asks for the whole device, which so many sessions fill. The host is empty, or full too."""
    bench = Bench(device=2 * number, host=2 * number, disk=4 * number)
    for each in range(number) if on_host else ():
        bench.placed(2, Tier.HOST, first_token=-1 - each)
    for each in range(number):
        bench.session(2 * BLOCK_SIZE, first_token=each)
    turn = bench.session(0)
    bench.begin_turn(turn)
    return partial(bench.placement.make_room, 2 * number, turn)


@pytest.mark.parametrize(
    ("prepare", "few", "most"),
    [(drain, 40, 12), (make_all_room, 40, 12), (partial(make_all_room, on_host=True), 20, 15)],
)
def test_ten_times_as_many_sessions_that_leave_cost_no_more_each(
    prepare: Callable[[int], Callable[[], object]], few: int, most: int
) -> None:
    assert 8 < growth(prepare, few) < most
